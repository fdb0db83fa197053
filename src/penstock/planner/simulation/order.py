"""Which jobs of a device must be over, without a clock: streams keep their order, and so does who waits for them."""


class Order:
    """What the host knows to be over.

    A stream of a device runs its jobs one after the other: where one is over, so are those before it. What compute
    waits for is over once the host has waited for compute.
    """

    def __init__(self) -> None:
        self._over: dict[str, int] = {}
        self._awaited: dict[str, int] = {}

    def await_by_compute(self, stream: str, number: int) -> None:
        """Note that compute goes on after a job."""
        self._awaited[stream] = max(number, self._awaited.get(stream, -1))

    def await_by_host(self, stream: str, number: int) -> None:
        """Note that the host goes on after a job."""
        self._over[stream] = max(number, self._over.get(stream, -1))

    def synchronize(self) -> None:
        """Note that the host goes on after all that compute was given."""
        for stream, number in self._awaited.items():
            self.await_by_host(stream, number)

    def is_over(self, stream: str, number: int) -> bool:
        """Whether a job must be over."""
        return number <= self._over.get(stream, -1)
