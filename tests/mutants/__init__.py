"""Mutation tests of the guards of lifetime: each wait, version check, generation, quarantine, event, lock and condition
of `infinity` is removed in turn, and some test has to fail.

    make mutants ARGS="--list"                        the sites
    make mutants ARGS="--only units/store.py"         run those of a file, a function or a name
    make mutants ARGS="--show optim/update.py:UpdatePipeline._bring:wait#1"

`sites` finds what can be removed, `trial` runs tests without it, `table` keeps results and reasons. `selections.toml`
lists the tests of each file, `justified.toml` the sites that no test can see.
"""
