"""Mutation tests of lifetime guards: each wait, version check, generation, quarantine, event, lock and condition of
`infinity` is removed in turn, and at least one test must fail.

    make mutants ARGS="--list"                        the sites
    make mutants ARGS="--only units/store.py"         run those of a file, a function or a name
    make mutants ARGS="--show update/stages.py:UpdateStages._read_param:wait#1"

`sites` finds the guards, `trial` runs tests without one, `table` keeps results and reasons. `selections.toml` lists the
tests of each file, `justified.toml` the guards whose removal no test can detect.
"""
