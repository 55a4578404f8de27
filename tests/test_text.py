import pytest

from tcore.text import Progress, did_you_mean, format_seconds, to_stderr, to_stdout


def test_durations_read_as_people_write_them() -> None:
    found = [format_seconds(s) for s in (0, 9.96, 59.6, 61, 3600, 90_061)]
    assert found == ["0.0 s", "0:10", "1:00", "1:01", "1:00:00", "25:01:01"]


def test_names_cannot_command_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;owned\x07\r\x9b2J\u202egpj.\udcff\ud800.mp4"
    to_stderr(name)
    to_stdout(f"{name}\n\tü 文")
    plain = r"a\x1b]0;owned\x07\x0d\x9b2J\u202egpj.\xff\ud800.mp4"
    assert capsys.readouterr() == (f"{plain}\n\tü 文\n", f"{plain}\n")


def test_only_a_near_word_is_suggested() -> None:
    assert "branch" in did_you_mean("brnach", ["branch", "masks"])
    assert did_you_mean("zzz", ["branch", "masks"]) == ""


@pytest.mark.parametrize(("every", "lines"), [(0.0, 3), (3600.0, 0)])
def test_progress_is_told_now_and_then(every: float, lines: int) -> None:
    said: list[str] = []
    progress = Progress("frames", 8, done=5, say=said.append, every=every)
    progress.advance("1 skipped")
    progress.update(7)
    progress.update(8)
    assert len(said) == lines
    if said:
        assert said[0].startswith("frames 6/8  1 skipped  ")
        assert "ETA" in said[0]
        assert "ETA" not in said[-1]


def test_work_of_unknown_length_has_no_end_to_foretell() -> None:
    said: list[str] = []
    Progress("frames", None, say=said.append, every=0).advance()
    assert said[0].startswith("frames 1  ")
    assert "ETA" not in said[0]


def test_a_terminal_shows_one_line_that_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress("frames", 2, every=1e-9)
    progress.advance()
    progress.advance()
    assert capsys.readouterr().err.count("\n") == 1
