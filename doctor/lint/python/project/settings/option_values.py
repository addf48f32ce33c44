"""Values that the options and settings of a program have in the starts that its project shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

from doctor.core.text import joined_lines
from doctor.lint.python.project.left_over import STARTS_PROGRAM
from doctor.lint.python.project.settings.declared_settings import (
    HOLDERS,
    DeclaredOption,
    NamedValues,
    declared_by,
    is_copy,
    literal,
    of_text,
    owner_and_entry,
    scalar,
    settings_in,
)
from doctor.lint.python.project.settings.hydra_entries import values_of_hydra
from doctor.lint.python.project.settings.needed_entries import may_be_read
from doctor.lint.python.project.settings.options import (
    StartTexts,
    names_other,
    number_in,
    own_starts,
    sets,
    shown_starts,
    starts_in,
    texts_of_starts,
    with_variables,
)
from doctor.lint.python.project.settings.yacs_entries import entry_values
from doctor.lint.python.project.starts.launch_counts import (
    LAUNCHERS,
    asks_for_more,
    may_start_ranks,
    programs_of,
)
from doctor.lint.python.project.unreached import is_program
from doctor.lint.python.script import UNKNOWN, ProjectModules, Script, last_name, per_script

Values = frozenset[object]
MOST_READ = 40
"""Files with a name that are parsed."""
_OF_RANKS = re.compile(
    r"rank|world|dist(?!ill|anc|ort|inct)|ddp|fsdp|zero|gpu|cuda|device|parallel|multi|deepspeed|node|local|sync|launch|horovod|slurm|apex|"
    r"strategy|accelerator|backend|nproc",
    re.IGNORECASE,
)
"""Names of options that a launcher or the kind of job gives."""
_OF_RESTARTS = re.compile(
    r"resum|restart|restor|continu|warm_?start|load|pretrain|(?:from|init|start)_?(?:from_)?(?:ckpt|checkpoint|weights)",
    re.IGNORECASE,
)
"""Names of options that a run gets when an earlier one has ended, which no first command has."""
_GIVES_MORE = re.compile(
    r"\$[@*\d]|\$\{[@*\d]|\$\{?\w*(?:ARG|OPT|FLAG|PARAM|EXTRA|CMD|CONF)|\.\.\.|(?<!\w)@\w", re.IGNORECASE
)
"""Parts of a command that may have more options."""
_CONFIGURATIONS = (".yaml", ".yml", ".json")
_OF_TRANSFORMERS = re.compile(r"\b(?:HfArgumentParser|TrainingArguments)\b")
"""What gives ``args`` defaults that no file of the project has."""
_OF_TRL = re.compile(r"\btrl\b")
"""Its arguments derive from those of Transformers, and have other defaults (trl/trainer/sft_config.py)."""
_DEFAULTS_OF_TRANSFORMERS: dict[str, object] = {
    **dict.fromkeys(("gradient_checkpointing", "fp16", "bf16", "torch_compile"), False),
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
}
"""transformers/training_args.py"""


def option_values(script: Script, node: ast.expr, *, restarts: bool = False) -> Values | None:
    """The values that an option of the command line (``args.mode``), or an entry of configurations (``cfg.train.amp``),
    has in all starts that the project shows; ``None`` if one is unknown, or nothing shows any. Names for ranks, devices
    and, unless they are asked for, restarts are left out."""
    owner, name = owner_and_entry(node)
    modules = script.modules
    if modules is None or not owner or not name.isidentifier():
        return None
    if _OF_RANKS.search(name):
        return None
    entry = entry_values(script, node)
    if entry is None:
        entry = values_of_hydra(script, node)
    if not restarts and _OF_RESTARTS.search(name):
        return entry if entry == frozenset({True}) else None  # on in the first run too
    if entry is not None:
        return entry if _is_known(entry) else None
    key = ("option values", script.path, owner if owner == "self" else "", name)
    if key not in modules.memo:
        modules.memo[key] = None  # while it is looked for
        found = _of_own_parser(script, modules, name)
        if found is None and owner != "self" and not _declared_in(script, name):
            found = _of_project(script, modules, name)
        modules.memo[key] = found
    values: Values | None = modules.memo[key]
    return values


def is_chosen_nowhere(script: Script, node: ast.expr, text: object) -> bool:
    """Whether configurations of the project give an entry, and neither they nor anything else there gives it a text for
    which a program has a branch: ``config["dataset"] == "faces"``."""
    (owner, name), modules = owner_and_entry(node), script.modules
    if modules is None or not owner or not isinstance(text, str) or not text or not name.isidentifier():
        return False
    if _OF_RANKS.search(name) or _OF_RANKS.search(text) or _OF_RESTARTS.search(name):
        return False
    given = re.compile(rf"^[ \t{{]*[\"']?{name}[\"']?[ \t]*:[ \t]*[\"']?\w", re.MULTILINE)
    launches = modules.mentioning(name, launches=True)
    if not any(given.search(one) for shown, one in launches if shown.endswith(_CONFIGURATIONS)):
        return False
    word = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    pages = modules.pages(script.location) if script.location else ()
    others = [one for _, one in modules.mentioning(text, launches=True)]
    if any(map(word.search, (*others, *pages, *modules.notebooks(text)))):
        return False
    programs = [one for one in modules.mentioning(text) if one[0].endswith(".py")]
    known = [settings_in(modules, shown, one) for shown, one in programs[: MOST_READ + 1]]
    if len(known) > MOST_READ or None in known:
        return False
    values = {literal(part) for one in known if one is not None for part in one.written.get(name, ())}
    values |= {option.default for one in known if one is not None for option in one.declared.get(name, ())}
    commands = [part for one in known if one is not None for part in one.commands]
    return text not in values and not any(map(word.search, commands))


def of_user(name: str) -> bool:
    """Whether a setting is none for ranks, devices or restarts, which a launcher, or a later run, gives."""
    return not _OF_RANKS.search(name) and not _OF_RESTARTS.search(name)


def setting_of(node: ast.expr) -> str:
    """The name of the option or entry that an expression reads; empty if it reads none."""
    return owner_and_entry(node)[1]


def may_have_more(command: str, program: str) -> bool:
    """Whether a command may give a program more options than it shows: ``train.py "$@"``. What is before its name is
    of the launcher: ``srun -n $2 python train.py``."""
    return _GIVES_MORE.search(command.partition(program)[2]) is not None


def given_in_text(text: str, name: str) -> Values:
    """The values that a configuration gives a name; empty if there is none, or one is a path, empty or unknown."""
    found = _given_anywhere(text, name, scalar, is_page=False)
    return frozenset(found) if _is_known(found) else frozenset()


def values_in_own_file(script: Script, node: ast.expr) -> Values:
    """The values of an entry in the only configuration that a script opens by a fixed name, if that has one such entry,
    and in the shell scripts of its folder that give it; empty if another text of the folder has the name."""
    name, modules = owner_and_entry(node)[1], script.modules
    calls = (one for one in script.all(ast.Call) if last_name(one.func) == "open")
    opened = {script.value(script.argument(one, "file", 0)) for one in calls}
    paths = [one for one in opened if isinstance(one, str) and one.endswith(_CONFIGURATIONS)]
    if modules is None or not name or len(paths) != 1:
        return frozenset()
    folder = PurePath(script.path).parent
    own = str(folder / paths[0])
    given = _given_anywhere(modules.text_at(own), name, scalar, is_page=False)
    beside = {shown: text for shown, text in _naming(modules, name) if PurePath(shown).parent == folder}
    others = {shown: text for shown, text in beside.items() if shown not in (own, script.path)}
    if len(given) != 1 or not all(shown.endswith(".sh") for shown in others):
        return frozenset()
    return frozenset(given).union(*(_given_anywhere(text, name, scalar, is_page=False) for text in others.values()))


def numbers_of(script: Script, name: str) -> Values:
    """The numbers that the project shows for an option or a setting: those of commands, configurations and pages that
    may start the script, what programs set, and defaults, unless each command that starts the script gives another one.
    :data:`UNKNOWN` is among them for one that cannot be read; empty if nothing gives one. Other programs do not count
    for an option of the script whose default is 1, or if a launch file or page starts the script itself."""
    modules = script.modules
    if modules is None or not name.isidentifier():
        return frozenset()
    key = ("numbers", script.path, name)
    if key not in modules.memo:
        modules.memo[key] = frozenset(_numbers(script, modules, name))
    found: Values = modules.memo[key]
    return found


def _numbers(script: Script, modules: ProjectModules, name: str) -> set[object]:
    spelled = name.replace("_", "[-_]")
    given = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"']?(?:\s?[:=]\s?|[ \t]+)[\"']?([^\s\"',;}})]+)")
    stated = re.compile(rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"'`]?(?:\s?[:=]\s?|[ \t]+)[\"'`]?(\d+)")
    texts, naming = texts_of_starts(script), dict(_naming(modules, name))
    own = settings_in(modules, script.path, script.text)
    if own is not None and name in own.copied and (copied := given_in_commands(script, own.copied[name])) is not None:
        return set(copied)
    declared = _declared_at(modules, script.path, script.text, name)
    is_shown = bool(texts.own or own_starts(script, texts.pages))
    is_own = bool(declared) and (is_shown or any(one.default == 1 for one in declared))
    is_own = is_own or (own is not None and name in own.fixed and is_program(script))
    launches = texts.launches
    if not is_own:
        others = {one: text for one, text in naming.items() if not one.endswith(".py")}
        others = {one: text for one, text in others.items() if may_be_read(script, one, text)}
        launches = _of_selected(script, modules, others)
    programs = {script.path: script.text}
    word = re.compile(rf"(?<![A-Za-z0-9_]){name}(?![A-Za-z0-9_])")
    others = {one: text for one, text in naming.items() if one.endswith(".py") and word.search(text)}
    programs |= {} if is_own else others
    if len(programs) > MOST_READ:
        return {UNKNOWN}
    launches, pages = (
        [_without_others(script, text, is_own=is_own) for text in one] for one in (launches, texts.pages)
    )
    found = {_number(number_in(one, text)) for text in launches for one in _given_in(given, text)}
    found |= {_number(one) for text in pages for one in stated.findall(text)}
    defaults: set[object] = set()
    for shown, text in programs.items():
        settings = settings_in(modules, shown, text)
        if settings is None:
            return {UNKNOWN}
        written = (literal(one) for one in settings.written.get(name, ()))
        found |= {one for one in written if isinstance(one, (int, float)) and not isinstance(one, bool)}
        found |= {UNKNOWN} if name in settings.replaced else set()
        defaults |= {one.default for one in settings.declared.get(name, ())}
    defaults -= {None} if found or len(defaults) > 1 else set()
    is_given = defaults != {1} and _is_in_all_starts(script, texts, given)
    return found if is_given else found | defaults


_ENTRIES = re.compile(r"[\[(]?[\"'\s]*(?:cuda:)?\d+[\"'\s]*[\])]?$|\[\s*\]$")
"""At most one device, in a list or a text: ``[0]``, ``"0"``, ``cuda:0``, ``[]``."""


def lists_one(script: Script, name: str) -> bool:
    """Whether an option or setting for a list has at most one number wherever the project gives it, by default, by a
    command or configuration, or by a program that sets it as an attribute; false if nothing does."""
    modules = script.modules
    if modules is None or not name.isidentifier():
        return False
    spelled = name.replace("_", "[-_]")
    given = re.compile(
        rf"(?<![\w-])(?:--)?(?:\w+\.)*{spelled}[\"']?(?:\s?[:=]\s?|[ \t]+)"
        r"(\[[^\]\n]*\]|[\"'][^\"'\n]*[\"']|\S+(?:[ \t]+\d+)*)"
    )
    declared = re.compile(rf"[\"']--?{spelled}[\"'][^\n]*\bdefault\s?=\s?(\[[^\]\n]*\]|[\"'][^\"'\n]*[\"']|\w+)")
    written = re.compile(rf"^[ \t]*\w+(?:\.\w+)*\.{name}[ \t]*=[ \t]*([^\s#=][^\n#]*?)[ \t]*(?:#|$)", re.MULTILINE)
    naming, texts = _naming(modules, name), texts_of_starts(script)
    programs = [text for shown, text in naming if shown.endswith(".py")]
    words = [one for text in programs for pattern in (declared, written) for one in pattern.findall(text)]
    others = [text for shown, text in naming if not shown.endswith(".py")]
    words += [
        one for text in (*others, *texts.pages) for one in given.findall(text) if one[0] in "[\"'" or one[0].isdigit()
    ]
    return bool(words) and all(map(_ENTRIES.match, words))


def _without_others(script: Script, text: str, *, is_own: bool) -> str:
    """A text without the commands that start the script as one process, and, for an option of its own, those that start
    other programs."""
    name = PurePath(script.path).name
    if name not in text and not (is_own and ".py" in text):
        return text
    plain = re.compile(rf"\bpython[\d.]*[ \t]+(?:-\w[ \t]+)*[\w./${{}}-]*{re.escape(name)}")

    def is_left_out(line: str) -> bool:
        if name not in line:
            return is_own and STARTS_PROGRAM.search(line) is not None
        if _OF_ONE_PROCESS.search(line) or (is_own and names_other(script, line)):
            return True
        return plain.search(line) is not None and LAUNCHERS.search(line) is None and _starts_no_ranks(script)

    return "\n".join(line for line in joined_lines(text) if not is_left_out(line))


@per_script
def _starts_no_ranks(script: Script) -> bool:
    return script.modules is not None and not may_start_ranks(script, script.modules)


_OF_ONE_PROCESS = re.compile(
    r"^(?!.*nnodes)(?!.*num_machines).*(?:nproc[_-]per[_-]node|num[_-]processes|num_gpus)[= ]1(?!\S)"
)


def _given_in(given: re.Pattern[str], text: str) -> Iterator[str]:
    """What a launch file gives; of its comments, numbers alone: ``# steps * batch_size`` gives none."""
    for one in given.finditer(text):
        start = text[text.rfind("\n", 0, one.start()) + 1 : one.start()].lstrip()
        if not start.startswith("#") or one[1][0].isdigit():
            yield one[1]


def _declared_at(modules: ProjectModules, shown: str, text: str, name: str) -> list[DeclaredOption]:
    settings = settings_in(modules, shown, text)
    return settings.declared.get(name, []) if settings is not None else []


def _number(word: str) -> object:
    value = scalar(word)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else UNKNOWN


def _is_in_all_starts(script: Script, texts: StartTexts, given: re.Pattern[str]) -> bool:
    """Whether each command of the project that starts a script has an option."""
    starts = [
        with_variables(line, text) for text in (*texts.launches, *texts.pages) for line in own_starts(script, [text])
    ]
    return bool(starts) and all(map(given.search, starts))


_MAKES = re.compile(r"^_target_:[ \t]*[\"']?([\w.]+)", re.MULTILINE)
"""The class of which a configuration of Hydra makes an object (hydra.utils.instantiate)."""


def _of_selected(script: Script, modules: ProjectModules, launches: dict[str, str]) -> list[str]:
    """The launch files, without those of other modules: where configurations make an object of a class of this one,
    those that make another object, and commands that name such a configuration alone."""
    makes = {
        shown: found[1].split(".")[-2:-1] == [PurePath(script.path).stem]
        for shown, text in modules.mentioning("_target_", launches=True)
        if (found := _MAKES.search(text))
    }
    if not any(makes.values()):
        return list(launches.values())
    return [text for shown, text in launches.items() if makes.get(shown, _may_select(makes, text))]


def _may_select(makes: dict[str, bool], text: str) -> bool:
    """Whether a launch file names a configuration that makes the object, or none that makes another."""
    words = set(re.findall(r"[\w-]+", text))
    named = [is_own for shown, is_own in makes.items() if PurePath(shown).stem in words]
    return any(named) or not named


def _declared_in(script: Script, name: str) -> list[DeclaredOption]:
    """The options of a name that a script declares."""
    calls = script.method_calls("add_argument")
    return [option for call in calls for one, option in declared_by(call, script.value) if one == name]


def is_text_option(script: Script, node: ast.expr) -> bool:
    """Whether an expression is an option that is one text, as each file of the project declares it that does."""
    name, modules = owner_and_entry(node)[1], script.modules
    if modules is None or not name:
        return False
    texts = dict(_naming(modules, name)) | {script.path: script.text}
    found = [one for at, text in texts.items() if at.endswith(".py") for one in _declared_at(modules, at, text, name)]
    return bool(found) and all(one.read("some words") == "some words" for one in found)


def _of_own_parser(script: Script, modules: ProjectModules, name: str) -> Values | None:
    """The values of an option of a program's own parser in each command of the project that starts it."""
    found = _declared_in(script, name)
    if len(found) != 1 or _is_set_by(script, name):
        return None
    option, texts = found[0], texts_of_starts(script)
    given = list(_given_in_starts(script, texts, option))
    if not given or not _is_known(given):
        return None
    is_switch = option.read(None) is not UNKNOWN
    if is_switch and all(one != option.default for one in given):
        return frozenset(given)  # all commands have it, whatever else a page says
    if _is_named_elsewhere(script, modules, texts, option, name):
        return None
    return frozenset(given)


def values_in_commands(script: Script, node: ast.expr) -> Values | None:
    """The values of an option of a program's own parser in the commands that start it, whatever else a page says of
    it; ``None`` if one is unknown, or there is no command."""
    name = owner_and_entry(node)[1]
    return None if _is_set_by(script, name) else given_in_commands(script, name)


def given_in_commands(script: Script, name: str) -> Values | None:
    """The same of an option by its name, also of one that the program replaces where no command gives it."""
    found = _declared_in(script, name)
    if script.modules is None or len(found) != 1:
        return None
    given = list(_given_in_starts(script, texts_of_starts(script), found[0]))
    return frozenset(given) if given and _is_known(given) else None


def is_empty_in_commands(script: Script, node: ast.expr) -> bool:
    """Whether the commands that start a script leave an option empty, or give it ``None``, a text that names no file,
    whatever the commands of other programs give it, and no page has it. The option may be one of a module of the
    project's."""
    name, modules = owner_and_entry(node)[1], script.modules
    if modules is None or not script.location or not name or _is_set_by(script, name):
        return False
    around = list(modules.texts_around(script.location))
    found = _declared_in(script, name)
    for text in around if not found else ():
        try:
            found += NamedValues(text).declared.get(name, ())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    if len(found) != 1 or found[0].default not in (None, ""):
        return False
    named = re.compile(rf"--{name.replace('_', '[-_]')}(?![\w-])")
    is_set = re.compile(rf"\.{name}\s*=(?!=)|\[[\"']{name}[\"']\]\s*=(?!=)")
    if any(map(named.search, modules.pages(script.location))):
        return False  # users are told to give it
    if any(is_set.search(text) for _, text in modules.mentioning(name)):
        return False
    given = list(_given_in_starts(script, texts_of_starts(script), found[0]))
    return bool(given) and all(one is None or one in ("", "None") for one in given)


def texts_in_commands(script: Script, node: ast.expr) -> frozenset[str]:
    """The texts that an option of a program's own parser has in the commands that start it, without those that leave it
    empty; none if one of them is unknown."""
    name = owner_and_entry(node)[1]
    found = _declared_in(script, name) if script.modules is not None and not _is_set_by(script, name) else []
    if len(found) != 1:
        return frozenset()
    given = set(_given_in_starts(script, texts_of_starts(script), found[0])) - {None, ""}
    texts = frozenset(one for one in given if isinstance(one, str) and "$" not in one)
    return texts if len(texts) == len(given) else frozenset()


def is_given_in_no_text(script: Script, node: ast.expr) -> bool:
    """Whether an option of a program's own parser is empty by default, and no command, configuration, page or other
    program of its whole project has its name, though there are commands, of this program or of others."""
    name, modules = owner_and_entry(node)[1], script.modules
    if modules is None or modules.is_one_file or not script.location or not modules.is_whole(script.location):
        return False
    found = _declared_in(script, name) if name.isidentifier() else []
    if len(found) != 1 or found[0].default not in (None, "") or _is_set_by(script, name):
        return False
    launches = [text for _, text in modules.mentioning(".py", launches=True)]
    if not any(map(STARTS_PROGRAM.search, (*launches, *modules.pages(script.location)))):
        return False
    texts, given = texts_of_starts(script), _in_command(found[0])
    starts = [
        with_variables(one, text) for text in (*texts.launches, *texts.pages) for one in own_starts(script, [text])
    ]
    if any(given.search(one) or may_have_more(one, PurePath(script.path).name) for one in starts):
        return False
    is_set = re.compile(rf"\.{name}\s*=(?!=)")
    others = (text for shown, text in modules.mentioning(name) if shown != script.path)
    return not any(map(is_set.search, others)) and not _is_named_elsewhere(script, modules, texts, found[0], name)


def _given_in_starts(script: Script, texts: StartTexts, option: DeclaredOption) -> Iterator[object]:
    name = PurePath(script.path).name
    for text in (*texts.launches, *texts.pages):
        for line in (with_variables(one, text) for one in own_starts(script, [text])):
            is_open = may_have_more(line, name) or _abbreviates(script, line, option)
            yield UNKNOWN if is_open else _given(line, text, option)


def _given(line: str, text: str, option: DeclaredOption) -> object:
    """What a command gives an option; the last one counts."""
    given = [_word(one["value"]) for one in _in_command(option).finditer(line)]
    if not given:
        return option.default
    word = given[-1]
    return option.read(number_in(word, text) if word is not None else None)


def _in_command(option: DeclaredOption) -> re.Pattern[str]:
    names = "|".join(re.escape(one).replace("_", "[-_]") for one in option.spelled)
    return re.compile(
        rf"(?<![\w-])(?:{names})(?![\w-])(?:(?:=|[ \t]+)(?P<value>\"[^\"]*\"|'[^']*'|(?!--?[A-Za-z])[^\s\"'`;|&)\]]+))?"
    )


def _word(text: str | None) -> str | None:
    return text.strip("\"'") if text is not None else None


def _abbreviates(script: Script, line: str, option: DeclaredOption) -> bool:
    """Whether a command has the begin of an option's name, which argparse takes for it unless it is another option."""
    named = {one.lstrip("-").replace("-", "_") for one in option.spelled if one.startswith("--")}
    given = {one.replace("-", "_") for one in re.findall(r"(?<![\w-])--([\w-]+)", line)} - named
    given = {one for one in given if not _declared_in(script, one)}
    return any(one.startswith(begin) for one in named for begin in given)


def _is_named_elsewhere(
    script: Script, modules: ProjectModules, texts: StartTexts, option: DeclaredOption, name: str
) -> bool:
    """Whether another text than the commands that start a script has an option, or sets its value."""
    program = PurePath(script.path).name
    spelled = "|".join(re.escape(one).replace("_", "[-_]") for one in option.spelled if one.startswith("--"))
    named = re.compile(rf"(?<![\w-])(?:{spelled})(?![\w-])|[\"']{name}[\"']|^[ \t]*{name}:", re.MULTILINE)
    others = [(shown, text) for shown, text in _naming(modules, name) if shown != script.path]
    for shown, text in (*others, *(("", text) for text in (*modules.notebooks(name), *texts.pages))):
        starts = set(starts_in(program, [text]))
        starts |= {one for one in joined_lines(text) if _starts_other_with(modules, one, program, spelled)}
        rest = "\n".join(one for one in joined_lines(text) if one not in starts)
        if named.search(_DECLARES.sub("", rest) if shown.endswith(".py") else rest):
            return True
    return False


def _starts_other_with(modules: ProjectModules, line: str, program: str, spelled: str) -> bool:
    """Whether a line starts another program of the project, which declares an option of that name itself."""
    names = {PurePath(one).name for one in re.findall(r"[\w./-]+\.py\b", line)}
    if STARTS_PROGRAM.search(line) is None or len(names) != 1 or program in names:
        return False
    declares = re.compile(rf"\badd_argument\(\s*(?:[\"']-\w[\"'],\s*)?[\"'](?:{spelled})[\"']")
    others = [text for shown, text in modules.mentioning("add_argument") if PurePath(shown).name in names]
    return bool(others) and all(map(declares.search, others))


_DECLARES = re.compile(r"\badd_argument\([^)\n]*")


def _is_set_by(script: Script, name: str) -> bool:
    """Whether the file itself sets it: ``args.dist_eval = True``, or the default of its parser."""
    return sets(script, name) or any(script.is_given(one, name) for one in script.method_calls("set_defaults"))


def _of_project(script: Script, modules: ProjectModules, name: str) -> Values | None:
    """The values that the files of a project give a name: defaults of options and fields, entries of configurations,
    commands, pages, and what programs set. They count if a command starts a program with the script, which then has the
    declared default, or a configuration has it."""
    programs = [one for one in _naming(modules, name) if one[0].endswith(".py")]
    if len(programs) > MOST_READ:
        return None
    found = [settings_in(modules, shown, text) for shown, text in programs]
    if None in found:
        return None
    known = [one for one in found if one is not None]
    declared = [option for one in known for option in one.declared.get(name, ())]
    read = declared[0].read if declared else scalar
    values = {one.default for one in declared}
    values.update(literal(part) for one in known for part in one.written.get(name, ()) if not is_copy(part, name))
    commands = [text for one in known for text in one.commands]
    values.update(given for text in commands for given in _given_anywhere(text, name, read, is_page=False))
    is_declared, is_configured = bool(declared), False
    for shown, text, is_page in _other_texts(script, modules, name):
        given = _given_anywhere(text, name, read, is_page=is_page)
        is_configured |= bool(given) and shown.endswith(_CONFIGURATIONS)
        values.update(given)
    if not is_declared and _OF_TRANSFORMERS.search(script.text):
        is_declared = _OF_TRL.search(script.text) is None
        values.add(_DEFAULTS_OF_TRANSFORMERS.get(name, UNKNOWN) if is_declared else UNKNOWN)
    if not (is_configured or (is_declared and _shows_starts(script, modules))):
        return None
    return frozenset(values) if _is_known(values) else None


def is_given_nowhere(script: Script, node: ast.expr) -> bool:
    """Whether an option that is empty by default, or an entry of a section of configurations (``cfg.model.weights``),
    has a value in no start, configuration or program that the project shows, if it shows any."""
    owner, name = owner_and_entry(node)
    modules = script.modules
    if modules is None or modules.is_one_file or not owner or not name.isidentifier():
        return False
    entry = entry_values(script, node)
    if entry is not None:
        return all(one is None or one == "" for one in entry)
    key = ("given nowhere", script.path, ast.unparse(node))
    if key not in modules.memo:
        sections = _entries_of_section(modules, node)
        modules.memo[key] = (
            not any(re.search(rf"(?:^|[\s,{{]){name}[\"']?[ \t]*:{_NOT_EMPTY}", one) for one in sections)
            if sections
            else _is_empty_everywhere(script, modules, name)
        )
    found: bool = modules.memo[key]
    return found


_NOT_EMPTY = r"(?![ \t]*(?:null|~|None|[\"']{2})?[ \t]*(?:[#,}]|$|\n))"
"""What follows the colon of an entry that has a value."""


def is_in_no_configuration(script: Script, node: ast.expr) -> bool:
    """Whether an entry of a configuration is in none of those that the commands name which start a script with several
    processes, nor in the commands: ``config["resume"]``, with ``python train.py --config first.yaml``."""
    name, modules = owner_and_entry(node)[1], script.modules
    if modules is None or not name.isidentifier() or _is_stored(script, name):
        return False
    starts = [line for line in shown_starts(script) if not _shows_one(line)]
    folder = PurePath(script.path).parent
    entry = re.compile(rf"^[ \t]*[\"']?{name}[\"']?[ \t]*:{_NOT_EMPTY}", re.MULTILINE)
    named = re.compile(rf"(?<![\w-]){name}(?=[\s=]|$)")

    def has_none(line: str) -> bool:
        configurations = [modules.text_at(str(folder / one)) for one in _CONFIGURATION.findall(line)]
        is_known = bool(configurations) and all(configurations)
        return is_known and not any(map(entry.search, configurations)) and named.search(line) is None

    return bool(starts) and all(map(has_none, starts))


_CONFIGURATION = re.compile(r"(?<![\w./$-])([\w./-]+\.(?:ya?ml|json))\b")
_SEES_ONE_GPU = re.compile(r"CUDA_VISIBLE_DEVICES=[\"']?\d+[\"']?(?=\s)")


def _shows_one(line: str) -> bool:
    return _SEES_ONE_GPU.search(line) is not None or _OF_ONE_PROCESS.search(line) is not None


def _is_stored(script: Script, name: str) -> bool:
    """Whether a script sets an attribute or an entry of that name."""
    return any(one.attr == name and isinstance(one.ctx, ast.Store) for one in script.all(ast.Attribute)) or any(
        script.value(one.slice) == name and isinstance(one.ctx, ast.Store) for one in script.all(ast.Subscript)
    )


def is_left_by_all_starts(script: Script, node: ast.expr) -> bool:
    """Whether the project shows commands that start a script, and neither they nor another part of it give an option
    that is empty by default."""
    return bool(shown_starts(script)) and is_given_nowhere(script, node)


def is_given_to_one_process(script: Script, node: ast.expr) -> bool:
    """Whether an option is given by commands that start a script as one process, and by none of those that start it
    with a launcher, though there are some, and pages explain it only beside such commands."""
    name, modules = owner_and_entry(node)[1], script.modules
    if modules is None or not name.isidentifier() or _is_set_by(script, name) or may_start_ranks(script, modules):
        return False
    texts = texts_of_starts(script)
    starts = own_starts(script, (*texts.launches, *texts.pages))
    given = re.compile(rf"(?<![\w-])--{name.replace('_', '[-_]')}(?![\w-])")
    launched = [one for one in starts if LAUNCHERS.search(one)]
    alone = [one for one in starts if one not in launched and given.search(one)]
    if (
        not launched
        or not alone
        or any(map(given.search, launched))
        or any(asks_for_more(script, one) for one in alone)
    ):
        return False
    sections = [one for text in texts.pages for one in _SECTIONS.split(text) if given.search(one)]
    return all(_is_of_starts_alone(script, one, given) for one in sections)


_SECTIONS = re.compile(r"^(?=#{2,6}[ \t])", re.MULTILINE)
"""The parts of a page, each with its heading."""


def _is_of_starts_alone(script: Script, section: str, given: re.Pattern[str]) -> bool:
    """Whether an option appears in commands of a part of a page alone, or is explained beside such commands, none of
    which has a launcher."""
    starts = own_starts(script, (section,))
    rest = any(given.search(one) for one in joined_lines(section) if one not in starts)
    return not rest or (any(map(given.search, starts)) and not any(map(LAUNCHERS.search, starts)))


def _entries_of_section(modules: ProjectModules, node: ast.expr) -> list[str]:
    """What each configuration of the project has in the section of an entry: of ``cfg.model.encoder.weights``, the
    lines below ``encoder:``. None if a text sets the entry by its path: ``encoder.weights=last.pt``."""
    base = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    base = base or getattr(node, "value", None)
    section, name = last_name(base) if isinstance(base, ast.Attribute) else "", owner_and_entry(node)[1]
    if not section or HOLDERS.match(section):
        return []
    if any(
        re.search(rf"\b{section}[.\"'\]\[]+{name}[\"'\]]*\s?=(?!=)", text) for _, text in modules.mentioning(section)
    ):
        return []
    texts = [text for _, text in modules.mentioning(section, launches=True)]
    below = re.compile(
        rf"^(?P<indent>[ \t]*){section}:[ \t]*(?:#.*)?\n(?P<lines>(?:(?P=indent)[ \t]+.*\n|[ \t]*\n)+)", re.M
    )
    return [one["lines"] for text in texts for one in below.finditer(f"{text}\n")]


def _is_empty_everywhere(script: Script, modules: ProjectModules, name: str) -> bool:
    programs = [one for one in _naming(modules, name) if one[0].endswith(".py")]
    settings = [settings_in(modules, shown, text) for shown, text in programs[: MOST_READ + 1]]
    if len(settings) > MOST_READ or None in settings or not _shows_starts(script, modules):
        return False
    known = [one for one in settings if one is not None]
    given: list[object] = [option.default for one in known for option in one.declared.get(name, ())]
    is_declared = bool(given)
    given += [literal(part) for one in known for part in one.written.get(name, ()) if not is_copy(part, name)]
    commands = [text for one in known for text in one.commands]
    given += [value for text in commands for value in _given_anywhere(text, name, scalar, is_page=False)]
    for _, text, is_page in _other_texts(script, modules, name):
        given += _given_anywhere(text, name, scalar, is_page=is_page)
    return is_declared and all(one is None or one == "" for one in given)


def _is_known(values: Iterable[object]) -> bool:
    """Whether these are values and not paths and the like, which are given or not: that is for the user to say."""
    return not any(one is UNKNOWN or one is None or one == "" for one in values)


def _other_texts(script: Script, modules: ProjectModules, name: str) -> Iterator[tuple[str, str, bool]]:
    for shown, text in _naming(modules, name):
        if not shown.endswith(".py"):
            yield shown, text, False
    pages = modules.pages(script.location) if script.location else ()
    for text in (*pages, *modules.notebooks(name)):
        yield "", text, True


_Read = Callable[[str | None], object]


def _given_anywhere(text: str, name: str, read: _Read, *, is_page: bool) -> list[object]:
    """The values that a text gives a name in any notation; :data:`UNKNOWN` for a mention that gives none."""
    spelled = name.replace("_", "[-_]")
    mention = re.compile(
        rf"(?<![\w-])(?P<option>--?)?(?:\w+\.)*{spelled}(?![\w-])[\"'`]?"
        rf"(?:(?P<by>[ \t]*[:=][ \t]*|[ \t]+)(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"'`,;|&)\]}}]+)?)?"
    )
    found: list[object] = []
    for one in mention.finditer(text):
        line = text[text.rfind("\n", 0, one.start()) + 1 : one.start()]
        if re.match(r"\s*(?:#|//)", line):
            continue
        is_entry = ":" in (one["by"] or "") or "=" in (one["by"] or "")
        if one["option"] or is_entry:
            found.append(_value_of(one["value"], text, read, is_entry=is_entry))
        elif is_page:
            found.append(UNKNOWN)
    return found


def _value_of(given: str | None, text: str, read: _Read, *, is_entry: bool) -> object:
    """The value that is meant by what stands after a name: a text in quotes as such in configurations, an option
    followed by another one for itself."""
    if given is None or (not is_entry and given.startswith("--")):
        return UNKNOWN if is_entry else read(None)
    word = given.strip("\"'")
    if read is scalar and is_entry and word != given:
        return of_text(word)
    word = number_in(word, text) if word else word
    return UNKNOWN if of_text(word) is UNKNOWN else read(word)


def _naming(modules: ProjectModules, name: str) -> list[tuple[str, str]]:
    """The scripts and launch files with a name in either spelling."""
    return list(dict(one for word in (name, name.replace("_", "-")) for one in modules.mentioning(word)).items())


def _shows_starts(script: Script, modules: ProjectModules) -> bool:
    """Whether the project has a command, without unknown parts, for each program with the script that it starts."""
    if is_program(script) and (own := shown_starts(script)):
        return not any(may_have_more(one, PurePath(script.path).name) for one in own)
    paths = [script.path] if is_program(script) else programs_of(modules, script.path)
    pages = modules.pages(script.location) if script.location else ()
    starts = [
        (line, name)
        for name in {PurePath(one).name for one in paths}
        for line in starts_in(name, [*(text for _, text in modules.mentioning(name, launches=True)), *pages])
    ]
    return bool(starts) and not any(may_have_more(*one) for one in starts)
