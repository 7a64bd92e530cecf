"""The hooks of the documentation site: copies of the files that pages link to, and API pages from the code.

mkdocs is not installed where these tests run, so a small stand-in of its file list takes its place; `make docs` builds
the site itself, with warnings as errors.
"""

import functools
import importlib.util
import posixpath
import re
import sys
import types
from pathlib import Path

import pytest

import alfish

ROOT = Path(alfish.__file__).parent.parent
DOCS = ROOT / "docs"


class File:
    """A page or file of the site, as `mkdocs.structure.files.File`."""

    def __init__(self, src_uri, content=None, abs_src_path=None):
        self.src_uri, self.abs_src_path, self._content = src_uri, abs_src_path, content

    @classmethod
    def generated(cls, config, src_uri, *, content=None, abs_src_path=None, inclusion=None):
        return cls(src_uri, content, abs_src_path)

    @property
    def content_string(self):
        return Path(self.abs_src_path).read_text() if self._content is None else self._content


class Files(list):
    """The files of the site, as `mkdocs.structure.files.Files`."""

    def documentation_pages(self):
        return [file for file in self if file.src_uri.endswith(".md")]

    def get_file_from_path(self, path):
        return next((file for file in self if file.src_uri == path), None)


def loaded(name, **modules):
    """Returns a module of docs/, with stand-ins for the modules that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        for module, members in modules.items():
            stand_in = types.ModuleType(module)
            vars(stand_in).update(members)
            patch.setitem(sys.modules, module, stand_in)
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made


@pytest.fixture(scope="module")
def hook():
    found = {
        "mkdocs": {},
        "mkdocs.config": {},
        "mkdocs.config.defaults": {"MkDocsConfig": object},
        "mkdocs.structure": {},
        "mkdocs.structure.files": {"File": File, "Files": Files, "InclusionLevel": types.SimpleNamespace(NOT_IN_NAV=1)},
        "mkdocs.structure.pages": {"Page": object},
    }
    made = loaded("site_hook", **found)
    made.api_pages = functools.cache(made.api_pages)
    return made


@pytest.fixture(scope="module")
def site(hook):
    """The files of the whole site: those of docs/, and those that the hook adds."""
    sources = [path for path in DOCS.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    files = Files(File(str(path.relative_to(DOCS)), abs_src_path=str(path)) for path in sources)
    return hook.on_files(files, None)


def page(uri):
    return types.SimpleNamespace(file=types.SimpleNamespace(src_uri=uri))


def shown(hook, site, uri, markdown):
    return hook.on_page_markdown(markdown, page=page(uri), files=site)


def test_each_link_of_each_page_leads_to_a_file_of_the_site(hook, site):
    missing = []
    for file in site.documentation_pages():
        text = shown(hook, site, file.src_uri, file.content_string)
        for target in re.findall(r"\]\(([^)\s#]+)", hook.FENCES.sub("", text)):
            address = posixpath.normpath(posixpath.join(posixpath.dirname(file.src_uri), target))
            if not re.match(r"[a-z]+:|/", target) and site.get_file_from_path(address) is None:
                missing.append(f"{file.src_uri}: {target}")
    assert missing == []
    assert len(site) > len(list(DOCS.rglob("*.md"))) + 30, "copies and API pages are there"


def test_a_file_of_the_repository_has_a_copy_with_its_text(hook, site):
    copy = site.get_file_from_path("repository/alfish/functional/returns.py.md").content_string
    assert copy.startswith("# alfish/functional/returns.py\n\n``````python\n")
    assert (ROOT / "alfish" / "functional" / "returns.py").read_text().rstrip() in copy
    text = shown(
        hook, site, "tutorials/algorithm.md", "[code](../../alfish/functional/returns.py#x), [page](../faq.md)"
    )
    assert text == "[code](../repository/alfish/functional/returns.py.md#x), [page](../faq.md)"


def test_a_directory_is_shown_as_the_list_of_its_files(hook):
    assert hook.copy("confs").startswith("# confs\n\n- [a2c.gin](confs/a2c.gin)\n- [a2c_cartpole.gin](")


def test_a_file_that_is_not_text_keeps_its_bytes(hook, site):
    copy = site.get_file_from_path("repository/examples/tour.ipynb")
    assert copy.abs_src_path == str(ROOT / "examples" / "tour.ipynb")


def test_missing_and_outside_link_targets_are_left_to_mkdocs(hook, site, monkeypatch):
    monkeypatch.setattr(hook, "api_pages", dict)
    for target in ("no_such_page.md", "../alfish/no_such_module.py", "../../elsewhere.md"):
        link = f"[a]({target})"
        assert shown(hook, site, "faq.md", link) == link
        files = hook.on_files(Files([File("faq.md", content=link)]), None)
        assert not any("no_such" in file.src_uri or "elsewhere" in file.src_uri for file in files)


def test_links_in_code_are_not_links(hook):
    text = "`[a](../alfish/nest.py)`\n```\n[b](../alfish/data.py)\n```\n[c](../alfish/functional/returns.py)"
    assert list(hook.targets("faq.md", text)) == ["alfish/functional/returns.py"]


def test_the_api_has_each_public_name_and_each_name_for_gin_files_once(site):
    index = site.get_file_from_path("api/index.md").content_string
    public, in_gin = index.split("## Names for gin files")
    rows = re.compile(r"^\| \[`(\w+)`\]\[([\w.]+)\] \| (\S.*) \|$", re.MULTILINE)
    assert [name for name, _, _ in rows.findall(public)] == alfish.__all__
    names = [name for name, _, _ in rows.findall(in_gin)]
    assert len(names) > 80 and {"PPO", "Trainer", "Linear", "make_environment", "Torso"} <= set(names)
    for name, place, _ in rows.findall(index):
        module, _, last = place.rpartition(".")
        assert last == name and getattr(importlib.import_module(module), name).__module__ == module
        assert f"::: {module}\n" in site.get_file_from_path(f"api/{module.split('.')[1]}.md").content_string


def test_the_navigation_has_the_index_of_the_api_first_and_no_commands(hook):
    config = types.SimpleNamespace(nav=[{"Start": []}, {"Reference": [{"Glossary": "glossary.md"}]}])
    pages = hook.on_config(config).nav[1]["Reference"][1]["API"]
    assert pages[0] == "api/index.md" and "api/algorithms.md" in pages and "api/bin.md" not in pages


def test_parameters_that_share_a_line_of_a_docstring_are_shown_one_by_one():
    joint = loaded("joint_parameters", griffe={"Extension": object, "Object": object})
    docstring = "Returns x.\n\nArgs:\n  low, high, step: of the range;\n    inclusive.\n  other: a, b: c.\n"
    extension, thing = joint.JointParameters(), types.SimpleNamespace(docstring=types.SimpleNamespace(value=docstring))
    extension.on_instance(obj=thing)
    each = "".join(f"  {name}: of the range;\n    inclusive.\n" for name in ("low", "high", "step"))
    assert thing.docstring.value == f"Returns x.\n\nArgs:\n{each}  other: a, b: c.\n"
    extension.on_instance(obj=types.SimpleNamespace(docstring=None))
