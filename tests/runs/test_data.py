"""Reading observed data from files: what every format gives, and what is said of files that cannot be used."""

import json

import numpy as np
import pytest
import xarray as xr

import cpejax as cpe
from cpejax.runs.data_files import check_shapes, read_data

GRAPH = cpe.Graph.from_edges(
    {"beta": ["mu"], "y": ["beta"], "total": ["mu"]},
    ["y", "total"],
    {"beta": ["group"], "y": ["group"]},
    {"group": 3},
)
Y, TOTAL = np.array([1.0, 2.5, -3.0]), 0.5


def table(shape):
    """A program's graph with one data site of this shape."""
    site = cpe.Site("x", shape, (None,) * len(shape), observed=True, parents=("a",))
    return cpe.Graph({"a": cpe.Site("a"), "x": site})


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, dict) and name.endswith(".npz"):
            np.savez(path, **content)
        elif isinstance(content, xr.Dataset | xr.DataTree):
            content.to_netcdf(path, engine="h5netcdf")
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.json", {"y": Y.tolist(), "total": TOTAL}),
        ("data.npz", {"y": Y, "total": np.array(TOTAL)}),
        ("DATA.NPZ", {"y": Y, "total": np.array(TOTAL)}),
        ("data.nc", xr.Dataset({"y": ("group", Y), "total": TOTAL})),
        ("data.nc", xr.DataTree.from_dict({"observed_data": xr.Dataset({"y": ("group", Y), "total": TOTAL})})),
        ("data.csv", "y[0],y[1],y[2],total\n1,2.5,-3,.5\n"),
    ],
    ids=["json", "npz", "capitals", "netcdf", "arviz", "csv"],
)
def test_every_format_gives_the_same(write, name, content):
    if name == "DATA.NPZ":
        path = write("data.npz", content).rename(write("data.npz", content).with_name(name))
    else:
        path = write(name, content)
    found = read_data(path, GRAPH, GRAPH.data)
    np.testing.assert_array_equal(found["y"], Y)
    np.testing.assert_array_equal(found["total"], TOTAL)
    assert check_shapes(found, GRAPH, "data") is False


@pytest.mark.parametrize(
    ("shape", "text", "expected"),
    [
        ((3,), "x\n1\n2\n3\n", [1, 2, 3]),
        ((3,), "1\n2\n3\n", [1, 2, 3]),
        ((3,), "1,2,3\n", [1, 2, 3]),
        ((2, 2), "\ufeff1,2\r\n3,4\r\n\r\n", [[1, 2], [3, 4]]),
        ((2, 2), "x[0],x[1]\n1,2\n3,4\n", [[1, 2], [3, 4]]),
        ((12,), f"{','.join(f'x[{i}]' for i in sorted(range(12), key=str))}\n0,1,10,11,2,3,4,5,6,7,8,9\n", range(12)),
        ((2,), "x[1],x[0]\n7,8\n", [8, 7]),
        ((2, 2), '"x[0, 0]","x[1, 1]","x[1, 0]","x[0, 1]"\n1,2,3,4\n', [[1, 4], [3, 2]]),
        ((2, 2), "x[0, 0], x[1, 1],x[1,0],x[0,1]\n1,2,3,4\n", [[1, 4], [3, 2]]),
        ((2, 2, 2), "x[0,0],x[1,0],x[0,1],x[1,1]\n1,2,3,4\n5,6,7,8\n", [[[1, 3], [2, 4]], [[5, 7], [6, 8]]]),
        ((1, 3), "1\n2\n3\n", [[1, 2, 3]]),
        ((), "x\n7\n", 7),
        ((1,), "7\n", [7]),
    ],
)
def test_tables(write, shape, text, expected):
    found = read_data(write("data.csv", text), table(shape), ["x"])
    np.testing.assert_array_equal(found["x"], expected)


def test_many_observations(write):
    found = read_data(write("data.csv", "x[0],x[1]\n1,2\n3,4\n5,6\n"), table((2,)), ["x"])
    assert check_shapes(found, table((2,)), "data") is True
    assert found["x"].shape == (3, 2)
    found = read_data(write("data.csv", "1\n2\n3\n"), table(()), ["x"])
    assert found["x"].shape == (3,)
    assert check_shapes({"x": np.zeros(5)}, table(()), "data") is True


def test_a_list_is_enough_where_there_is_one_site(write):
    np.testing.assert_array_equal(read_data(write("d.json", "[1, 2]"), table((2,)), ["x"])["x"], [1, 2])


@pytest.mark.parametrize(
    ("shape", "text", "message"),
    [
        ((2,), "x[0],x[0]\n1,2\n", r"data.csv: the column 'x\[0\]' is there twice"),
        ((2,), "x,x\n1,2\n", "data.csv: the column 'x' is there twice"),
        ((2,), "x[0],x[7]\n1,2\n", r"there is a column 'x\[7\]' and there is no column 'x\[1\]'"),
        ((3,), "x[0],x[1]\n1,2\n", r"there is no column 'x\[2\]'; expected is 'x' of shape \(3,\)"),
        ((2,), "x[1],x[2]\n1,2\n", r"there is a column 'x\[2\]' and there is no column 'x\[0\]'"),
        ((2, 2), "x[0],x[1, 1]\n1,2\n", r"the columns 'x\[0\]' and 'x\[1, 1\]' name different numbers of positions"),
        ((2,), "x[0],x\n1,2\n", r"the columns 'x\[0\]' and 'x' name different numbers of positions"),
        ((2,), '"x[0, 0]","x[0, 1]"\n1,2\n', r"the column 'x\[0, 0\]' has 2 positions; expected is"),
        ((2, 3, 4), "1,2,3,4,5,6\n" * 4, r"table of shape \(4, 6\), but .* Name the positions"),
        ((2, 3, 4), "x[0],x[1],x[2],x[3]\n" + "1,2,3,4\n" * 6, r"table of shape \(6, 4\), but"),
        ((2, 3), "1,2,3,4,5,6\n", r"table of shape \(1, 6\), but .* cannot be told.* as in \"x\[0, 0\]\""),
        ((2, 3), "1,2\n3,4\n5,6\n", r"table of shape \(3, 2\), but .* cannot be told"),
        ((3,), "z\n1\n2\n3\n", r"data.csv has 'z', which is not a site of the program; .* Did you mean .x."),
        ((2, 2), "first,second\n1,2\n3,4\n", "data.csv has 'first', which is not a site"),
    ],
)
def test_tables_are_not_guessed(write, shape, text, message):
    with pytest.raises(ValueError, match=message):
        read_data(write("data.csv", text), table(shape), ["x"])


def nested(depth):
    return [nested(depth - 1)] if depth else 1


GOOD = {"y": Y.tolist(), "total": TOTAL}
BAD = [
    ("data.txt", "1 2 3", r"data.txt ends in '\.txt'; data are read from JSON \(\.json\), CSV"),
    ("data.json", "{", r"data.json is not JSON: Expecting property name .* in line 1, column 2"),
    ("data.json", b"\xff\xfe", "data.json is not JSON: it is not text"),
    ("data.json", "[1, 2, 3]", r"data.json holds a list, expected an object such as \{\"y\": \[...\]\} with 'y' of sh"),
    ("data.json", "3", "data.json holds a int, expected an object"),
    (
        "data.json",
        {**GOOD, "Y": 1},
        r"data.json has 'Y', which is not a site of the program; expected are 'y' of shape",
    ),
    ("data.json", {**GOOD, "totl": 1}, r"has 'totl', .* Did you mean 'total'\?"),
    ("data.json", {**GOOD, "mu": 1}, "data.json has 'mu', which is a parameter, not data"),
    (
        "data.json",
        {"y": GOOD["y"]},
        "data.json has no 'total'; expected are 'y' of shape .3,. .3 group., 'total', a sing",
    ),
    ("data.json", {**GOOD, "y": ["1", "2", "3"]}, r"'y' is not made of numbers: it holds the text '1' at \[0\]"),
    ("data.json", {**GOOD, "y": [1, 2, "b"]}, r"'y' is not made of numbers: it holds the text 'b' at \[2\]"),
    ("data.json", {**GOOD, "y": [[1, 2], [3, "4"]]}, r"it holds the text '4' at \[1, 1\]"),
    ("data.json", {**GOOD, "y": [1, 10**400, 2]}, r"'y' holds a whole number of more than 63 bits at \[1\]"),
    ("data.json", '{"y": [1, 2, 3], "total": 1, "y": [4, 5, 6]}', "data.json: 'y' is there twice"),
    ("data.json", "[" * 100_000, "data.json is nested too deeply to be read; expected are 'y' of shape"),
    (
        "data.json",
        {**GOOD, "y": nested(60)},
        "'y' is lists in lists, 32 deep and more; expected is a number or a table",
    ),
    ("data.csv", "1,2,3,4\n", "data.csv has no header, so its columns are not named; expected are 'y'"),
    ("data.json", {**GOOD, "y": [1, None, 2]}, "'y' is not made of numbers: it holds null"),
    (
        "data.json",
        {**GOOD, "y": [[1, 2], [3]]},
        "the lists of 'y' are not a table: their lengths differ. Expected is 'y'",
    ),
    ("data.json", {**GOOD, "y": {"a": 1}}, "'y' is not made of numbers: it holds {'a': 1}"),
    ("data.csv", "", "data.csv is empty; expected are 'y'"),
    ("data.csv", "y,total\n", "data.csv has a header but no rows"),
    ("data.csv", "y,total\n1,a\n", "data.csv: row 2, column 'total' holds the text 'a', expected a number"),
    ("data.csv", "y,total\n1,\n", "data.csv: row 2, column 'total' is empty, expected a number"),
    ("data.csv", "y,total\n1,2\n3\n", "data.csv: row 3 has 1 columns, the first has 2"),
    ("data.csv", "y,tota\n1,2\n", r"data.csv has 'tota', which is not a site .* Did you mean 'total'\?"),
    ("data.csv", b"\xff\x00", "data.csv is not CSV"),
    ("data.npz", b"PK", "data.npz cannot be read"),
    (
        "data.npz",
        {"y": np.array([{}], dtype=object)},
        "data.npz cannot be read: it holds Python objects, which are never",
    ),
    ("data.nc", b"nothing", "data.nc is not a NetCDF file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[m[:45] for _, _, m in BAD])
def test_bad_files(write, name, content, message):
    with pytest.raises(ValueError, match=message):
        read_data(write(name, content), GRAPH, GRAPH.data)


def test_files_that_are_not_there(tmp_path, write):
    write("data.json", GOOD)
    with pytest.raises(ValueError, match=r"dta.json does not exist. Did you mean .*data.json\?"):
        read_data(tmp_path / "dta.json", GRAPH, GRAPH.data)
    with pytest.raises(ValueError, match="is a folder, expected a file"):
        read_data(tmp_path, GRAPH, GRAPH.data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"y": np.zeros(4), "total": np.zeros(())},
            r"'y' has shape \(4,\), but the program simulates 'y' of shape \(3,\)",
        ),
        ({"y": np.zeros((0, 3)), "total": np.zeros(0)}, r"'y' has shape \(0, 3\)"),
        (
            {"y": np.array([1, np.nan, 2]), "total": np.zeros(())},
            r"1 of 3 values of 'y' are missing or infinite.*\[1\]",
        ),
        ({"y": np.array([1, 1e39, 2]), "total": np.zeros(())}, "1 of 3 values of 'y' are missing or infinite"),
        (
            {"y": np.zeros((2, 3)), "total": np.zeros(())},
            "different numbers of observations: 2 of 'y', a single one of",
        ),
        ({"y": np.zeros((2, 3)), "total": np.zeros(4)}, "different numbers of observations: 2 of 'y', 4 of 'total'"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(values, GRAPH, "data.json")
