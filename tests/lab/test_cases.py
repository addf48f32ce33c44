"""Every case of a test runs, and the names of all failed ones are in its message."""

import pytest

from tests.lab.cases import SHOWN, assert_each, each_case


def _positive(number: int) -> None:
    assert number > 0


def _inverse(number: int) -> float:
    return 1 / number


def _skipping() -> None:
    pytest.skip("not here")


def test_every_case_passes():
    seen = []
    assert_each(seen.append, [("one", (1,)), ("two", (2,))])
    assert seen == [1, 2]


def test_all_failed_cases_are_named():
    with pytest.raises(pytest.fail.Exception) as failed:
        assert_each(_positive, [("minus one", (-1,)), ("one", (1,)), ("minus two", (-2,))])
    text = str(failed.value)
    assert "2 of 3 cases failed" in text
    assert "minus one: _positive" in text
    assert "minus two: _positive" in text
    assert "assert -2 > 0" in text


def test_an_exception_is_reported_with_its_traceback():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)zero: Traceback.*return 1 / number.*ZeroDivisionError"):
        assert_each(_inverse, [("zero", (0,))])


@pytest.mark.parametrize(("judge", "cases"), [(_skipping, [("a", ())]), (_positive, [])], ids=["skipped", "none"])
def test_what_does_not_run_fails(judge, cases):
    with pytest.raises(pytest.fail.Exception):
        assert_each(judge, cases)


def test_a_long_list_is_counted():
    with pytest.raises(pytest.fail.Exception, match=r"\.\.\. and 3 more"):
        assert_each(_positive, [(str(number), (-number,)) for number in range(SHOWN + 3)])


@each_case("number, square", [(2, 4), (3, 9)])
def test_cases_beside_a_fixture(tmp_path, number, square):
    (tmp_path / f"{number}").touch()
    assert number**2 == square


@pytest.mark.parametrize("ids", [None, str, ["1", "2", "3"]], ids=["values", "function", "list"])
def test_a_failed_case_is_named(ids):
    @each_case("number", [1, 2, 3], ids=ids)
    def test(number):
        assert number != 2

    with pytest.raises(pytest.fail.Exception, match=r"1 of 3 cases failed:\s+2: test, line"):
        test()
