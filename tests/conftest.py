"""What all tests share: the fixtures of the lab."""

pytest_plugins = ("tests.lab.plugin",)
