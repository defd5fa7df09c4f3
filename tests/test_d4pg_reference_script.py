"""The example script of D4PG."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "d4pg_pendulum_reference", "d4pg/pendulum"
