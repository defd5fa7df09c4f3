"""The example script of MBPO."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "mbpo_pendulum_reference", "mbpo/pendulum"
