"""``--help`` as plain text in groups: no name is ever cut, however narrow the terminal."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand


class PlainHelp(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            kind = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)
