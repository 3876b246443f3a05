"""Builds the pages of this folder and the reference of the public names: `make docs`."""

import ast
import importlib
import inspect
import re

from sphinx.pycode import ModuleAnalyzer

import tokamax

project = "tokamax"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "tokamax"
html_show_copyright = False
maximum_signature_line_length = 100

# The pages are written for GitHub as well: links to headings are those that GitHub makes.
myst_heading_anchors = 3
# Docstrings put code into single backticks, as Markdown does.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
napoleon_attr_annotations = False

nitpicky = True
# References to public names must resolve. The documentation of JAX and Python is not at hand, and what is not public
# (the class of an op's configs, say) is named in signatures without a link.
nitpick_ignore_regex = [(r"py:.*", r"(?!tokamax\.).*"), (r"py:.*", r"tokamax\._src\..*")]

MARK = re.compile(r"^<!-- reference: (\S+) -->$", re.MULTILINE)
"""In a page, the place of the reference of a module."""


def public_names(module):
    """Returns the public names of a module in the order of its imports, and where each comes from."""
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module for node in imports for alias in node.names if node.module != "tokamax"}


def directive(place, value, origin):
    """Returns the directive that documents a value under its public name."""
    if value is tokamax.Op:  # What a subclass overrides begins with an underscore.
        return f".. autoclass:: {place}\n   :members:\n   :private-members:\n"
    if inspect.isclass(value):
        return f".. autoclass:: {place}\n   :members:\n   :exclude-members: config_cls\n"
    if inspect.isroutine(inspect.unwrap(value)):
        return f".. autofunction:: {place}\n"
    # An instance: an option has a docstring of its own, anything else the text below its assignment.
    found = ModuleAnalyzer.for_module(origin).find_attr_docs().get(("", place.rpartition(".")[2]))
    text = value.__doc__ if found is None else " ".join(found)
    return f".. py:data:: {place}\n\n   {text}\n"


PUBLIC: dict[str, str] = {}
"""Where a value is defined -> its public name."""


def reference(module_name):
    """Returns the reference of a module as a block of reStructuredText for the parser of Markdown."""
    module = importlib.import_module(module_name)
    names = [] if module is tokamax else public_names(tokamax)
    places = {id(getattr(tokamax, name)): f"tokamax.{name}" for name in names}
    parts = []
    for name, origin in public_names(module).items():
        value, place = getattr(module, name), f"{module_name}.{name}"
        if id(value) in places:
            parts.append(f".. py:data:: {place}\n\n   The same as :py:obj:`{places[id(value)]}`.\n")
        else:
            places[id(value)] = place
            parts.append(directive(place, value, origin))
    return "```{eval-rst}\n" + "\n".join(parts) + "```"


def contents(text, pages):
    """Returns the tables of contents that the index makes: a section for each of its headings, by its links.

    Pages that it does not link yet come at the end.
    """
    _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    sections = {
        title: re.findall(r"\]\((\w+)\.md\)", body) for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    further = sorted(pages - {"index"} - {name for names in sections.values() for name in names})
    return "".join(
        "\n".join(["\n```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```\n"])
        for title, names in {**sections, "More": further}.items()
        if names
    )


def fill_in(app, docname, source):
    """Puts references in the place of their marks, and the tables of contents behind the index."""
    source[0] = MARK.sub(lambda mark: reference(mark[1]), source[0])
    if docname == "index":
        source[0] += contents(source[0], app.env.found_docs)


def resolve(app, env, node, contnode):
    """Links the type of an annotation, which is named by where it is defined, to its public name."""
    public = PUBLIC.get(node.get("reftarget"))
    if public is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], public, node, contnode)


def tidy_docstring(app, what, name, value, options, lines):
    """Keeps napoleon from taking what stands before a colon for the type of a property."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # An empty comment.


def tidy_signature(app, what, name, value, options, signature, returns):
    """Leaves out what a caller does not give, and makes default factories readable for the parser of signatures."""
    if signature is not None:
        signature = re.sub(r", _\w+: [^,)]*", "", signature).replace("<factory>", "...")
    return signature, returns


def setup(app):
    """Connects the above."""
    for module in (tokamax, tokamax.autotuning, tokamax.benchmarking, tokamax.config, tokamax.costmodel):
        for name in public_names(module):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                PUBLIC.setdefault(f"{value.__module__}.{value.__qualname__}", f"{module.__name__}.{name}")
    app.connect("source-read", fill_in)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", tidy_docstring, priority=400)
    app.connect("autodoc-process-signature", tidy_signature)
