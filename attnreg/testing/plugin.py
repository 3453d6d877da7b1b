"""A pytest plugin: `pytest -p attnreg.testing.plugin --attnreg-backend=mine` adds a test for each check.

It isn't an entry point of pytest's: pytest imports those in every test run of everybody who has attnreg
installed, and this one imports torch.
"""

from __future__ import annotations

import functools

import pytest

from attnreg.errors import AttnregError
from attnreg.testing.cases import Check
from attnreg.testing.kit import Conformance


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("attnreg", "checking attention backends by attnreg's contract")
    group.addoption(
        "--attnreg-backend", default="", metavar="NAMES", help="one backend, or several with commas"
    )
    group.addoption("--attnreg-device", default=None, metavar="DEVICE", help="cpu, cuda or cuda:1")
    group.addoption(
        "--attnreg-seed", default=0, type=int, metavar="N", help="the seed of values and of random cases"
    )


@pytest.hookimpl(tryfirst=True)  # before -k and -m select among them
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks of each backend that is named."""
    for name in filter(None, map(str.strip, config.getoption("--attnreg-backend").split(","))):
        seed = config.getoption("--attnreg-seed")
        try:
            kit = Conformance(name, config.getoption("--attnreg-device"), seed=seed)
        except AttnregError as error:
            raise pytest.UsageError(f"--attnreg-backend={name}: {error}") from error
        items += [
            CheckItem.from_parent(session, name=f"{name}[{check}]", kit=kit, check=check)
            for check in kit.checks
        ]
        items.append(DeclaredItem.from_parent(session, name=f"{name}[runs what it declares]", kit=kit))


class CheckItem(pytest.Item):
    """One check of a backend."""

    def __init__(self, *, kit: Conformance, check: Check, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.kit, self.check = kit, check

    def runtest(self) -> None:
        """Run it; refused ones are skipped with the reasons."""
        outcome = self.kit.run(self.check)
        if not outcome.passed:
            pytest.fail(str(self.kit.report([outcome])), pytrace=False)
        if outcome.refused:
            pytest.skip("; ".join(outcome.reasons))

    def reportinfo(self) -> tuple[str, None, str]:
        """Return what pytest shows of it."""
        return "attnreg", None, self.name


class DeclaredItem(pytest.Item):
    """That a backend doesn't refuse every case of what it declares."""

    def __init__(self, *, kit: Conformance, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.kit = kit

    def runtest(self) -> None:
        """Run checks until one of each thing has run."""
        if never := self.kit.never_ran(functools.cache(self.kit.run)):
            pytest.fail("\n".join(never), pytrace=False)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return what pytest shows of it."""
        return "attnreg", None, self.name
