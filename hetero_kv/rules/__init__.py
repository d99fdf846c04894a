"""Rules: which module of a model becomes which operator; read from YAML, checked, and put into a loaded model."""

from hetero_kv.rules.rule_file import Rule, RuleSet, load_rules, nearest_module_paths, parse_rules

__all__ = ["Rule", "RuleSet", "load_rules", "nearest_module_paths", "parse_rules"]
