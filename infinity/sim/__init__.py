"""The engine's decisions on a virtual clock, whose links take bytes ÷ bandwidth."""
