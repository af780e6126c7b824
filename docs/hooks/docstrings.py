"""Docstrings are Markdown but for their examples, `>>> ...`, which become blocks of code here."""

import griffe


def fenced(text: str) -> str:
    """The text with each run of lines from `>>>` to the next empty one as a block of code."""
    out, inside = [], False
    for line in text.splitlines():
        if not inside and line.startswith(">>> "):
            out.append("```pycon")
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)


class Doctests(griffe.Extension):
    """Marks the examples in the docstrings of everything that is shown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for every module, class, function and attribute once it is read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
