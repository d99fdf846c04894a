"""Mistakes where data files are read, and where runs are written, gone on with and reported."""

from __future__ import annotations

from tests.mutations.seeded import Mutation

_REPORT = "tests/evals/test_report.py::test_"
_RUNS = "tests/evals/test_run_folder.py::test_"
_DATA = "tests/evals/test_data_files.py::test_"
_DURABLE = "tests/test_durable_file.py::test_"

RUNS = (
    Mutation(
        "settings of a run are taken whatever they hold",
        "hetero_kv/evals/run_folder.py",
        "        _require_run(content)\n",
        "",
        (f"{_RUNS}settings_of_a_run_that_are_none_are_named",),
    ),
    Mutation(
        "deep nesting in a run's files is a foreign error",
        "hetero_kv/evals/checked_lines.py",
        "except RecursionError as error:",
        "except MemoryError as error:",
        (f"{_RUNS}settings_of_a_run_that_are_none_are_named",),
    ),
    Mutation(
        "a device in the place of a run's file is read to its end",
        "hetero_kv/evals/run_folder.py",
        "if not stat.S_ISREG(status.st_mode):",
        "if False:",
        (f"{_RUNS}a_device_in_the_place_of_a_file_is_not_read_for_ever",),
    ),
    Mutation(
        "a folder in the place of a run's settings is a foreign error",
        "hetero_kv/evals/run_folder.py",
        "    except (OSError, ValueError) as error:\n        raise HeteroKVError(\n",
        "    except ValueError as error:\n        raise HeteroKVError(\n",
        (f"{_RUNS}a_folder_in_the_place_of_a_file_is_not_compared[run.json]",),
    ),
    Mutation(
        "a folder in the place of a run's lock is a foreign error",
        "hetero_kv/evals/run_folder.py",
        "with writing(path):\n            path.mkdir",
        "if True:\n            path.mkdir",
        (f"{_RUNS}a_folder_in_the_place_of_a_file_is_named[.lock]",),
    ),
    Mutation(
        "a folder in the place of what a run writes is a foreign error",
        "hetero_kv/evals/run_folder.py",
        "with writing(path):\n                _settle(",
        "if True:\n                _settle(",
        (f"{_RUNS}a_folder_in_the_place_of_a_file_is_named",),
    ),
    Mutation(
        "bytes that are no text in results are a foreign error",
        "hetero_kv/evals/run_folder.py",
        '    except (OSError, ValueError) as error:\n        raise HeteroKVError(f"{str(results)!r} cannot',
        '    except OSError as error:\n        raise HeteroKVError(f"{str(results)!r} cannot',
        (f"{_RUNS}a_line_that_is_no_result_is_named",),
    ),
    Mutation(
        "an edited line is taken",
        "hetero_kv/evals/checked_lines.py",
        "if _checksum(bare) != found[1]:",
        "if False:",
        (f"{_RUNS}an_edited_line_is_noticed",),
    ),
    Mutation(
        "a line counts twice",
        "hetero_kv/evals/run_folder.py",
        "if earlier != number:",
        "if False:",
        (f"{_RUNS}a_line_that_is_there_twice_is_noticed",),
    ),
    Mutation(
        "a full disk is a foreign error",
        "hetero_kv/evals/run_folder.py",
        'raise HeteroKVError(f"out {str(path)!r} cannot be written: {reason}; {remedy}") from error',
        "raise",
        (f"{_RUNS}a_full_disk_is_an_error_that_loses_nothing",),
    ),
    Mutation(
        "a line that did not fit is half there",
        "hetero_kv/evals/run_folder.py",
        "self._file.truncate(before)",
        "pass",
        (f"{_RUNS}a_line_that_did_not_fit_is_not_half_there",),
    ),
    Mutation(
        "what a killed run left beside its files stays",
        "hetero_kv/evals/run_folder.py",
        "        abandoned.unlink()",
        "        pass",
        (f"{_RUNS}a_resumed_run_removes_temporary_files_of_a_killed_one",),
    ),
    Mutation(
        "files have permissions of their own",
        "hetero_kv/durable_file.py",
        "        os.fsync(descriptor)\n        os.replace(partial, path)",
        "        os.fsync(descriptor)\n        os.chmod(partial, 0o644)\n        os.replace(partial, path)",
        (f"{_RUNS}files_are_the_users_alone_under_a_umask_that_says_so",),
    ),
    Mutation(
        "a file's new name is not written out",
        "hetero_kv/durable_file.py",
        "    sync_folder(path.parent)",
        "    pass",
        (f"{_DURABLE}content_is_on_the_disk_before_the_name_and_the_name_before_it_returns",),
    ),
    Mutation(
        "a moved file's new name is not written out",
        "hetero_kv/durable_file.py",
        "    sync_folder(target.parent)",
        "    pass",
        (f"{_DURABLE}content_is_on_the_disk_before_the_name_and_the_name_before_it_returns",),
    ),
    Mutation(
        "a write that fails leaves half of a file behind",
        "hetero_kv/durable_file.py",
        "            os.unlink(partial)\n        raise",
        "            pass\n        raise",
        (f"{_DURABLE}a_full_disk_leaves_only_the_old_file",),
    ),
    Mutation(
        "a line unpacks to any size",
        "hetero_kv/evals/text_files.py",
        "file.readline(LONGEST_LINE + 1)",
        "file.readline()",
        (f"{_DATA}a_line_that_unpacks_without_end_is_not_unpacked",),
    ),
    Mutation(
        "lines unpack to any size together",
        "hetero_kv/evals/text_files.py",
        "if left < 0:",
        "if False:",
        (f"{_DATA}many_lines_that_unpack_without_end_are_not_unpacked",),
    ),
    Mutation(
        "a text that cannot fit is encoded to find out",
        "hetero_kv/evals/configured_model.py",
        "if characters > most:",
        "if False:",
        ("tests/evals/test_fidelity.py::test_a_file_that_cannot_fit_is_refused_by_name_before_anything_is_done",),
    ),
    Mutation(
        "names of others are Markdown",
        "hetero_kv/evals/markdown.py",
        'return _SIGNS.sub(lambda found: f"&#{ord(found[0])};", _one_line(text))',
        "return _one_line(text)",
        (f"{_REPORT}names_of_others_command_no_terminal_break_no_table_and_make_no_links",),
    ),
    Mutation(
        "names of others command terminals from reports",
        "hetero_kv/evals/markdown.py",
        '" ".join(printable(str(text)).split())',
        '" ".join(str(text).split())',
        (f"{_REPORT}names_of_others_command_no_terminal_break_no_table_and_make_no_links",),
    ),
    Mutation(
        "names of others are formulas in plots",
        "hetero_kv/evals/plots.py",
        '{"text.parse_math": False}',
        "{}",
        (f"{_REPORT}names_of_others_command_no_terminal_break_no_table_and_make_no_links",),
    ),
    Mutation(
        "names of others command terminals from summaries",
        "hetero_kv/evals/report.py",
        "text = escaped(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))",
        "text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)",
        (f"{_REPORT}names_of_others_command_no_terminal_break_no_table_and_make_no_links",),
    ),
)
