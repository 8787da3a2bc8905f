"""Numbers with units, as people read them."""


def show_bytes(count: float) -> str:
    """1_300_000_000 -> '1.30 GB'; decimal units, since disks and bandwidths are given in them."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}" if abs(count) >= 100 * size else f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def show_count(count: float) -> str:
    """10_844_160 -> '10.8 M'."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def show_flops(count: float) -> str:
    """1_300_000_000 -> '1.3 GFLOP'."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}FLOP"
    return f"{count:.3g} FLOP"


def show_seconds(seconds: float) -> str:
    """92.4 -> '1:32', 7322 -> '2:02:02'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def counted(count: int, noun: str) -> str:
    """(1, "unit") -> '1 unit', (1200, "unit") -> '1,200 units'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
