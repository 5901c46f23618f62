"""Hooks of mkdocs: figures/, which is beside docs/, becomes a part of the site.

Links to figures and their summaries are the same on a page and in the repository.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SHOWN = (".csv", ".md", ".png", ".svg")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures to the files of the site."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / "figures").rglob("*")):
        if path.suffix in SHOWN:
            name = path.relative_to(root).as_posix()
            files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and figures/ for the site, whose root is docs/."""
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri.startswith("figures/"):
        return markdown.replace(f"]({up}docs/", f"]({up}")
    return markdown.replace(f"]({up}../figures/", f"]({up}figures/")
