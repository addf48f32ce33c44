"""What all tests share: the rules of the suite and the fixtures of the lab."""

pytest_plugins = ("tests.suite", "tests.lab.plugin")
