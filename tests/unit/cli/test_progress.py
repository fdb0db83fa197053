import pytest

from penstock.cli.training.progress import Progress, bytes_by_tier, format_bytes, format_seconds


class Report:
    def bytes(self, *, tier: str) -> int:
        return {"device": 10, "cpu": 20, "nvme": 0}[tier]


def test_tiers_without_bytes_are_left_out() -> None:
    assert bytes_by_tier(Report()) == {"device": 10, "cpu": 20}


def test_time_left_at_the_pace_so_far() -> None:
    progress = Progress(
        step=20,
        steps=100,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_second=1.0,
        seconds=10.0,
        skipped_count=0,
        bytes_by_tier={},
    )
    assert progress.seconds_left == 40


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (9.6, "0:10"), (125, "2:05"), (3725, "1:02:05")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
