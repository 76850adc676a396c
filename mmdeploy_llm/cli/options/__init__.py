"""Options of commands, in groups by theme: one table, from which commands are made.

A group is a frozen dataclass in a file of its own. Each field is an option: the field's name with
hyphens is the option's name, its default the option's default, and its annotation says the rest.
A method of the group says what the options do: `to_settings` returns fields of BatchSettings,
`to_engine` options of LLM(), `to_sampling` parameters of SamplingParams. One line in DeskOptions
(shared.py) gives a group to both `caption` and `batch`; a parameter of a command gives it to that
command alone:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ColourOptions(Group):
        shade: Annotated[str, typer.Option(metavar="NAME", help="...")] = "red"

        def to_settings(self) -> dict[str, Any]:
            return {"shade": self.shade}

Nothing here imports what is heavy at its top, so that --help is quick.
"""
