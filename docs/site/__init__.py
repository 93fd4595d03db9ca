"""What `make docs` adds to mkdocs: links into the repository, executed notebooks, options from docstrings."""
