"""The example script of APPO."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "appo_cartpole_reference", "appo/cartpole"
