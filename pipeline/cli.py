"""The command line: a verb, then Hydra overrides.

The verb is popped from the arguments and the rest goes to a `@hydra.main` function, so that config
groups, `+experiment=`, `--cfg job` and `--multirun` are Hydra's own. Whatever the user got wrong
ends with one clear message and exit code 2, never a traceback. Neither torch nor Ray is imported
before a verb runs: help answers at once.

A verb that has a section of the configuration to itself takes the section's keys without its name,
and the text that `generate` continues is taken as it stands: Hydra would read commas and braces.

Exit codes: 0 done, 2 the user's mistake, 1 a failure, 75 try again (interrupted, resumable), 3 done
but for evaluation tasks whose data could not be had.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from pipeline.config import (
    ConfigError,
    EvalsConfig,
    ExportConfig,
    GenerateConfig,
    IncompleteError,
    ManifestConfig,
    PermanentError,
    PlanConfig,
    nearest,
)
from pipeline.help import KINDS, VERBS, explain_override, main_help, verb_help

USER_MISTAKE, FAILURE, TRY_AGAIN, INCOMPLETE = 2, 1, 75, 3
SECTIONS = {  # a verb's own section, whose keys need no name before them
    "eval": ("evals", EvalsConfig),
    "export": ("export", ExportConfig),
    "generate": ("generate", GenerateConfig),
    "plan": ("plan", PlanConfig),
    **dict.fromkeys(("manifest", "submit", "logs", "stop"), ("manifest", ManifestConfig)),
}
# Verbs that take `nodes` for `cluster.nodes`.
SIZED = ("plan", "manifest", "submit", "logs", "stop", "status")
PROMPT = "generate.prompt="


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one verb and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(main_help())
        sys.exit(0 if arguments else USER_MISTAKE)
    verb, overrides = arguments[0], [_courtesy(item, arguments[0]) for item in arguments[1:]]
    if verb not in VERBS:
        _fail(f"no verb {verb!r}; {nearest(verb, VERBS)}")
    if any(item in {"-h", "--help"} for item in overrides):
        print(verb_help(verb))
        sys.exit(0)
    if verb in KINDS:
        kind = _kind(verb, overrides)
        verb, overrides = f"{verb} {kind}", [item for item in overrides if item != kind]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises; this function words the message
    # Idle OpenMP threads sleep: where they spin, one busy neighbour makes a step 20 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prompts = [item.removeprefix(PROMPT) for item in overrides if item.startswith(PROMPT)]
    overrides = [item for item in overrides if not item.startswith(PROMPT)]
    sys.argv = [f"pipeline {verb}", *overrides]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _compose_and_call(verb, prompts)
    except ConfigError as error:
        _fail(str(error))
    except PermanentError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(FAILURE)
    except IncompleteError as error:
        print(f"incomplete: {error}", file=sys.stderr)
        sys.exit(INCOMPLETE)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(TRY_AGAIN)
    except SystemExit:
        raise
    except Exception as error:
        mistake = _composition_mistake(error, overrides)
        if mistake:
            _fail(mistake)
        traceback.print_exc()
        print(f"\npipeline {verb} failed: {error}", file=sys.stderr)
        sys.exit(FAILURE)
    sys.exit(0)


def _compose_and_call(verb: str, prompts: list[str]) -> None:
    """Let Hydra compose, call the verb, and raise what it raised without Hydra's own words."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    errors: list[BaseException] = []

    @hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
    def run(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        settings = HydraConfig.get()
        raw: Any = OmegaConf.to_container(composed, resolve=True)
        choices = settings.runtime.choices
        raw["experiment"] = choices.get("experiment")
        for name in ("run", "resume", "name"):  # an id or its beginning may be all digits
            if type(raw[name]) is int:
                raw[name] = str(raw[name])
        for prompt in prompts:
            raw["generate"]["prompt"] = prompt
        if errors:  # of a sweep's earlier job
            return
        try:
            _verb_function(verb)(raw, list(settings.overrides.task))
        except BaseException as error:  # raised again below, once Hydra has returned
            errors.append(error)

    try:
        run()
    except (ValueError, TypeError) as error:  # such as Hydra's parser of `=5`
        raise ConfigError(f"the overrides cannot be read: {error}") from error
    if errors:
        raise errors[0]


def _verb_function(verb: str) -> Callable[[dict[str, Any], list[str]], None]:
    from pipeline import verbs

    return getattr(verbs, verb.replace(" ", "_"))


def _kind(verb: str, overrides: list[str]) -> str:
    """The word after a verb that says what of it to do; Hydra would refuse it."""
    word = overrides[0] if overrides else ""
    if verb == "compare" and any(item.startswith("+study=") for item in overrides):
        return "study"
    if word not in KINDS[verb]:
        hint = nearest(word, KINDS[verb])
        _fail(f"{verb}: say what, as {verb} {KINDS[verb][0]} run=latest; {hint}")
    return word


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _courtesy(override: str, verb: str) -> str:
    """`experiment=x` means `+experiment=x`, as `study`: the group has no default to replace.

    A key of the verb's own section is given the section's name.
    """
    key = override.partition("=")[0]
    if verb in SECTIONS:
        section, kind = SECTIONS[verb]
        if key.partition(".")[0] in {field.name for field in dataclasses.fields(kind)}:
            return f"{section}.{override}"
    if verb in SIZED and key == "nodes":
        return f"cluster.{override}"
    return f"+{override}" if key in {"experiment", "study"} else override


def _composition_mistake(error: Exception, overrides: list[str]) -> str | None:
    """What to tell the user where Hydra or OmegaConf refused the configuration."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    hints = [hint for item in overrides if (hint := explain_override(item))]
    return "\n".join(hints) or str(error)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USER_MISTAKE)
