"""The documentation site: ``make docs`` builds it from the Markdown files beside this one."""

project = "FlashMoA"
copyright = "FlashMoA contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "FlashMoA"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

# Headings down to this level can be linked to, as on GitHub.
myst_heading_anchors = 3

# In the order of the source, signatures as written.
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Listener": "Listener"}
# What "Attributes:" lists, as one list.
napoleon_use_ivar = True
# AutoGen's docstrings are AutoGen's.
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80
add_module_names = False
