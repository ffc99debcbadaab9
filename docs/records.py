"""A hook of mkdocs: every README.md under records/ becomes a page, and the page Records lists them all."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

RECORDS = Path(__file__).parent.parent / "records"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each record, and the pictures it shows."""
    for readme in sorted(RECORDS.glob("*/README.md")):
        folder = readme.parent

        def resolve(found: re.Match[str], folder: Path = folder) -> str:
            """Pictures of the record are taken along; other files of the repository are only named."""
            image, text, target = found.groups()
            path = (folder / target).resolve()
            if image and path.is_file() and path.is_relative_to(folder):
                uri = f"records/{folder.name}/{path.relative_to(folder)}"
                if files.get_file_from_path(uri) is None:
                    files.append(File.generated(config, uri, abs_src_path=str(path)))
                return f"![{text}]({folder.name}/{path.relative_to(folder)})"
            return found[0] if target.startswith("#") else f"{text} (`{target}`)"

        page = File.generated(
            config,
            f"records/{folder.name}.md",
            content=LINK.sub(resolve, readme.read_text(encoding="utf-8")),
            inclusion=InclusionLevel.NOT_IN_NAV,
        )
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """The list, newest first, in place of ``<!-- records -->``."""
    lines = []
    for readme in sorted(RECORDS.glob("*/README.md"), reverse=True):
        headings = re.findall(r"^# (.+)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
        title = headings[0] if headings else readme.parent.name
        lines.append(f"- `{readme.parent.name[:10]}` [{title}](records/{readme.parent.name}.md)")
    return markdown.replace("<!-- records -->", "\n".join(lines))
