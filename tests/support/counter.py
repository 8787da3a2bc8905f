"""State of a module, which a model's forward may count up."""

count = 0


class Counter:
    """Has no state of its own: its methods change the module's, and its class methods the class's."""

    total = 0

    def increase(self) -> int:
        return increase()

    @classmethod
    def increase_total(cls) -> int:
        cls.total += 1
        return cls.total


def increase() -> int:
    global count
    count += 1
    return count
