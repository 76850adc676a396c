"""Options of commands, in groups by theme, from which commands are made.

An option that Python has too is a row there, with a Flag: a field of EngineConfig
(values/options/config.py), or a key of the TypedDict of a call (batch/arguments.py and those that
it names). Rows(...) gives it to a command; what is given goes to `to_engine`, options of LLM(), or
`to_batch`, options of LLM.run_batch, without another line. Only the program's own options are
declared here, as fields of a group: the field's name with hyphens is the option's name, and a
method says what it does: `to_settings` returns fields of BatchSettings, `to_sampling` parameters of
SamplingParams. One line in DeskOptions (shared.py) gives a group to both `caption` and `batch`; a
parameter of a command gives it to that command alone:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ColourOptions(Group):
        palette: Annotated[Given, Rows(RunArguments, "palette")]
        shade: Annotated[str, typer.Option(metavar="NAME", help="...")] = "red"

        def to_settings(self) -> dict[str, Any]:
            return {"shade": self.shade}

Nothing here imports what is heavy at its top, so that --help is quick.
"""
