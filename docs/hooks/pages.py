"""What MkDocs asks while it builds the site: pages that are made from files outside docs/.

- Tutorials are the scripts in `tutorials/`. `CPEJAX_DOCS_RUN=no` leaves out running those that are not in the cache.
- The page of the command is what the command says of itself.
- A page may show a table of another, `<!-- table "speed" of inference.md -->`, which a benchmark has filled in there.
- Contributing and the changelog are the files at the top of the repository, with links that lead into the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import command
import tutorials
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COPIED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures that are made here."""
    for source, page in COPIED.items():
        files.append(File.generated(config, page, content=within_site((ROOT / source).read_text(encoding="utf-8"))))
    files.append(File.generated(config, "reference/command.md", content=command.page()))
    for script in sorted((ROOT / "tutorials").glob("*.py")):
        page = "getting-started.md" if script.stem == "getting_started" else f"tutorials/{script.stem}.md"
        content, figures = tutorials.built(script, may_run=os.environ.get("CPEJAX_DOCS_RUN") != "no")
        files.append(File.generated(config, page, content=content))
        for figure in figures:
            files.append(File.generated(config, str(Path(page).parent / figure.name), abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Put in the tables of other pages."""

    def table(mark: re.Match[str]) -> str:
        name, page = mark.groups()
        text = (Path(config.docs_dir) / page).read_text(encoding="utf-8")
        return text.split(f"<!-- {name} -->\n")[1].split(f"<!-- end of {name} -->")[0]

    return re.sub(r'<!-- table "([^"]+)" of (\S+) -->', table, markdown)


def within_site(text: str) -> str:
    """Links of a file at the top of the repository as links of a page; those to what has no page become text."""
    text = re.sub(r"\]\(docs/([^)]*)\)", r"](\1)", text)
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
    return re.sub(r"\[([^\]]*)\]\((?:examples|src|tests|benchmarks|LICENSE|CITATION)[^)]*\)", r"`\1`", text)
