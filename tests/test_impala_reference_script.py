"""The example script of IMPALA."""

from registry_contract import ReferenceScript


class TestReferenceScript(ReferenceScript):
    script, preset = "impala_cartpole_reference", "impala/cartpole"
