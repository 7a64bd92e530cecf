"""Adds to the site the files of the repository that pages link to, and the API pages.

A link such as `../alfish/functional/returns.py` works where a code host shows `docs/`. The site has its own copy of
the file: text as a page with highlighted code, other files as they are. A link to a file that does not exist stays,
and mkdocs refuses it.

API pages are made from the code: one for each package, and an index of `alfish.__all__` and of the names for gin files.
"""

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parent.parent
COPIES = "repository/"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCES = re.compile(r"^( *)(```|~~~).*?^\1\2`*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".gin": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml"}
NOT_TEXT = {".png", ".svg", ".csv", ".ipynb"}


# Files of the repository


def origin(page: str) -> str:
    """Path in the repository of the file that a page of the site shows."""
    return page[len(COPIES) :].removesuffix(".md") if page.startswith(COPIES) else f"docs/{page}"


def address(path: str) -> str:
    """Address in the site of a file or directory of the repository."""
    if path.startswith("docs/"):
        return path[len("docs/") :]
    return COPIES + (path if Path(path).suffix in NOT_TEXT else f"{path}.md")


def targets(page: str, text: str) -> Iterator[str]:
    """Paths in the repository of what a page's relative links name; these files may be missing."""
    for _, target, _ in LINK.findall(FENCES.sub("", text)):
        if not re.match(r"[a-z]+:|/", target):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(origin(page)), target))


def copy(path: str) -> str:
    """Text of the page that shows a file or the files of a directory."""
    source = REPOSITORY / path
    if source.is_dir():
        names = sorted(file.name for file in source.iterdir() if file.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({posixpath.basename(path)}/{name})" for name in names)])
    text = source.read_text()
    if source.suffix == ".md":
        return text
    return f"# {path}\n\n``````{LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n``````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    known = {f"docs/{file.src_uri}" for file in files}
    while pages:
        page, text = pages.popitem()
        for path in set(targets(page, text)) - known:
            if not (REPOSITORY / path).exists() or path.startswith("../"):
                continue
            known.add(path)
            if Path(path).suffix in NOT_TEXT:
                made = File.generated(config, address(path), abs_src_path=str(REPOSITORY / path))
            else:
                pages[address(path)] = copy(path)
                made = File.generated(config, address(path), content=copy(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(made)
    for name, content in api_pages().items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Points links to files of the repository to the site's copies."""
    here = page.file.src_uri

    def pointed(match: re.Match[str]) -> str:
        found = list(targets(here, match[0]))
        if not found or files.get_file_from_path(address(found[0])) is None:
            return match[0]
        target = posixpath.relpath(address(found[0]), posixpath.dirname(here) or ".")
        return f"{match[1]}{target}{match[3]}"

    return LINK.sub(pointed, markdown)


# API pages


class Definition(NamedTuple):
    name: str
    module: str
    summary: str
    in_gin: bool

    @property
    def reference(self) -> str:
        return f"| [`{self.name}`][{self.module}.{self.name}] | {self.summary} |"


def modules() -> dict[str, ast.Module]:
    """Public modules of alfish by their dotted names."""
    found = {}
    for file in sorted((REPOSITORY / "alfish").rglob("*.py")):
        parts = file.relative_to(REPOSITORY).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            found[".".join(part for part in parts if part != "__init__")] = ast.parse(file.read_text())
    return found


def definitions(module: str, tree: ast.Module) -> Iterator[Definition]:
    """Public classes and functions of a module that have a docstring."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            docstring = ast.get_docstring(node)
            if docstring:
                in_gin = any("gin.configurable" in ast.unparse(decorator) for decorator in node.decorator_list)
                summary = " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")
                yield Definition(node.name, module, summary, in_gin)


def package_of(module: str) -> str:
    """Package below alfish that a module belongs to, or the module itself; `alfish` for the top."""
    return (module.split(".") + ["alfish"])[1] if module != "alfish" else "alfish"


def api_pages() -> dict[str, str]:
    trees = modules()
    defined = [one for module, tree in trees.items() for one in definitions(module, tree)]
    pages: dict[str, str] = {}
    for module in dict.fromkeys(one.module for one in defined):
        if package_of(module) == "bin":  # commands; `alfish COMMAND --help` describes them
            continue
        name = f"api/{package_of(module)}.md"
        pages.setdefault(name, f"# alfish.{package_of(module)}\n")
        pages[name] += f"\n::: {module}\n"
    pages["api/index.md"] = index(trees["alfish"], defined)
    return pages


def index(top: ast.Module, defined: list[Definition]) -> str:
    (homes,) = (
        ast.literal_eval(node.value)
        for node in top.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME"
    )
    public = []
    for name, home in sorted(homes.items()):
        (one,) = (one for one in defined if one.name == name and f"{one.module}.".startswith(f"{home}."))
        public.append(one.reference)
    in_gin = [one.reference for one in sorted(defined) if one.in_gin]
    head = "|   |   |\n|---|---|"
    parts = [
        ["# API", "`import alfish` gives these names. Each package of alfish has a page of its own."],
        ["\n".join([head, *public])],
        ["## Names for gin files", "`alfish params NAME` prints the parameters of each."],
        ["\n".join([head, *in_gin])],
    ]
    return "\n\n".join(text for part in parts for text in part) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the API pages in the navigation."""
    (reference,) = (part["Reference"] for part in config.nav or [] if "Reference" in part)
    reference.append({"API": sorted(api_pages(), key=lambda name: (name != "api/index.md", name))})
    return config
