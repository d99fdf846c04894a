"""Rules say which module of a model becomes which operator. They are read from YAML, checked and injected."""

from hetero_kv.rules.rule_file import load_rules, nearest_module_paths, parse_rules
from hetero_kv.rules.rule_set import Rule, RuleSet

__all__ = ["Rule", "RuleSet", "load_rules", "nearest_module_paths", "parse_rules"]
