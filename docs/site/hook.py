"""Hook of mkdocs: links that lead out of docs/ lead to pages of the site, too.

Pages of docs/ link to files of the repository (sample inputs, reports, examples) by relative paths, as GitHub reads
them. What they link to, and what those pages link to, becomes part of the site under repository/.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
CODE = {".py": "python", ".toml": "toml", ".jsonl": "json"}  # files that are shown as a page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to outside docs/, and what that links to."""
    docs = Path(config.docs_dir)
    open_ = [docs / one.src_uri for one in files.documentation_pages()]
    seen = set(open_)
    while open_:
        page = open_.pop()
        for target in _targets(page):
            if target in seen or target.is_relative_to(docs) or not target.is_file():
                continue
            seen.add(target)
            files.append(_file(target, config))
            if target.suffix == ".md":
                open_.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of a page to where their files are in the site. Search puts docs/ first and leaves reports out."""
    if page.file.src_uri.startswith(f"{FOLDER}/benchmarks/results/"):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith(f"{FOLDER}/"):
        page.meta["search"] = {"boost": 0.3}
    here = _source(page.file, config)
    if here.suffix != ".md":
        return markdown
    places = {_source(one, config): one.src_uri for one in files}

    def place(link: re.Match[str]) -> str:
        target = places.get((here.parent / link[1]).resolve())
        return link[1] if target is None else posixpath.relpath(target, posixpath.dirname(page.file.src_uri))

    return LINK.sub(place, markdown)


def _targets(page: Path) -> list[Path]:
    """Files that a page links to."""
    return [(page.parent / link[1]).resolve() for link in LINK.finditer(page.read_text(encoding="utf-8"))]


def _file(path: Path, config: MkDocsConfig) -> File:
    """A file of the repository as one of the site: code as a page that shows it, others as they are."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix not in CODE:
        return File.generated(config, f"{FOLDER}/{name}", abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    shown = f"# {name}\n\n````{CODE[path.suffix]}\n{path.read_text(encoding='utf-8')}````\n"
    return File.generated(config, f"{FOLDER}/{name}.md", content=shown, inclusion=InclusionLevel.NOT_IN_NAV)


def _source(file: File, config: MkDocsConfig) -> Path:
    """The file of the repository that a file of the site shows."""
    name = file.src_uri
    if not name.startswith(f"{FOLDER}/"):
        return Path(config.docs_dir) / name
    path = ROOT / name.removeprefix(f"{FOLDER}/")
    return path.with_suffix("") if path.with_suffix("").suffix in CODE else path
