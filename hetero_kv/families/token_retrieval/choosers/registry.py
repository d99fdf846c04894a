"""The registry of choosers."""

from hetero_kv.families.token_retrieval.choosers.chooser import Chooser
from hetero_kv.families.token_retrieval.choosers.settings import TokenSettings
from hetero_kv.settings.registry import Registry

CHOOSERS: Registry[TokenSettings, Chooser] = Registry("chooser", "a way to choose tokens")

register, names, get = CHOOSERS.register, CHOOSERS.names, CHOOSERS.get
