"""The example script of FQF."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "fqf_cartpole_reference", "fqf/cartpole"
