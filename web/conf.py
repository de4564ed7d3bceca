"""How Sphinx builds the site from what stage.py has laid out. `make site` calls both."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# One file of npm's mathjax, with its glyphs: no page loads anything from another host.
MATHJAX = HERE.parent / "build/npm/node_modules/mathjax/es5/tex-svg.js"

project = html_title = "minidist"
author = "minidist contributors"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.mathjax"]

# Notebooks show their stored outputs. Nothing runs.
nb_execution_mode = "off"
nb_merge_streams = True  # else each line that was printed has a box of its own
nb_render_error_lexer = "text"  # our errors are sentences, not tracebacks
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

smartquotes = False  # "ring" is an argument, also in a text

python_maximum_signature_line_length = 80  # a longer one has a line for each argument
python_use_unqualified_type_names = True  # Trace, and not md.tracing.Trace

html_theme = "furo"
html_favicon = str(HERE / "static/icon.svg")
highlight_language = "text"  # a fence that names no language is what a cell has printed
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
html_static_path = [str(HERE / "static"), str(MATHJAX)]
html_css_files = ["minidist.css"]
templates_path = [str(HERE / "templates")]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/lab.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = html_show_sourcelink = html_use_index = html_show_copyright = False
mathjax_path = MATHJAX.name
# MathJax's menu would fetch more of its files, which are not there.
mathjax3_config = {"options": {"enableMenu": False}}

# A button on what one might type, none on what a cell has printed.
copybutton_selector = "div.cell_input pre, div.highlight-python pre"


def speak_korean(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Readers aloud and hyphenation need the language of a page."""
    if page.startswith("notebooks/ko/"):
        context["language"] = "ko"


def setup(app: Any) -> None:
    app.connect("html-page-context", speak_korean)
