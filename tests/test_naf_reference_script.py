"""The example script of NAF."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "naf_pendulum_reference", "naf/pendulum"
