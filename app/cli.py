"""The command table: names, flags and help. What a command does is imported when it runs, so help is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from .version import VERSION


class Commands(click.Group):
    """Lists its commands in the order they are written here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class WithSettings(click.Command):
    """Has a flag for every setting beside its own; ask `get_params`, for they are made when first needed."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from .commands.settings import flags

        return [*self.params, *flags(), self.get_help_option(ctx)]  # type: ignore[list-item]


class Model(click.ParamType[str]):
    """A model's name; a folder, written with a leading /, ./, ../ or ~, becomes a whole path."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .store.catalog import is_path, resolve

        return str(resolve(value, allow_path=True).path) if is_path(value) else str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from .store.catalog import available

        return [CompletionItem(model.id) for model in available() if model.id.startswith(incomplete)]


class BackendName(click.ParamType[str]):
    """One of the backends, or auto."""

    name = "backend"

    def _names(self) -> tuple[str, ...]:
        from ..backends import AUTO, ORDER

        return (AUTO, *ORDER)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(click.Choice(self._names()).convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

backend_flag = click.option(
    "--backend", type=BackendName(), metavar="NAME", help="Run on this backend, not the first that works here."
)
quant_flag = click.option(
    "--quant", type=click.Choice(["none", "int8", "int4", "fp8"]), help="Make the weights smaller on load."
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs to read.")
default_model = click.argument("model", type=Model(), required=False)


def sampling_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """How an answer is drawn. What is not given is the model's own default."""
    flags: list[Decorator] = [
        click.option("--system", metavar="TEXT", help="What the model is told before the conversation."),
        click.option("--temperature", type=float, help="Randomness: 0 always takes the likeliest token."),
        click.option("--top-p", type=float, help="Draw from the likeliest tokens that make up this share, 0 to 1."),
        click.option("--top-k", type=int, help="Draw from this many likeliest tokens; 0 is off."),
        click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
        click.option("--max-tokens", type=int, help="Longest answer, in tokens."),
        click.option("--seed", type=int, help="The same seed gives the same answer again."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: localllm chat. Each command has its own --help with examples.",
)
@click.version_option(VERSION, message="localllm %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run language models on your own machine: chat in the terminal, or serve them to other programs."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command()
@default_model
@sampling_flags
@backend_flag
@quant_flag
def chat(model: str | None, backend: str | None, quant: str | None, **asked: Any) -> int:
    """Chat with a model in the terminal.

    Without MODEL your default model is used, at first the built-in guide. When input does not come from a terminal,
    each line of it is one message and the answers go to standard output.

    \b
    Examples:
      localllm chat
      localllm chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
      printf 'hi\\nwho are you?\\n' | localllm chat
    """
    from .commands.chat import chat as body

    return body(model, backend, quant, asked)


@cli.command()
@click.argument("model", type=Model())
@click.argument("prompt", required=False)
@sampling_flags
@click.option("--schema", type=click.File("rb"), metavar="FILE", help="Answer with JSON that fits this JSON schema.")
@click.option("--regex", metavar="PATTERN", help="Answer with text that matches this regular expression.")
@backend_flag
@quant_flag
@json_flag
def run(model: str, prompt: str | None, backend: str | None, quant: str | None, as_json: bool, **asked: Any) -> int:
    """Answer one prompt and print the answer as it comes.

    Piped input is added after PROMPT, or is the prompt when there is none. A file that a loop of the shell reads line
    by line is left to the loop. --json prints one object with text, finish, usage and timings.

    \b
    Examples:
      localllm run guide "How do I pull a model?"
      cat notes.txt | localllm run Qwen/Qwen3-0.6B "Summarise this:"
      localllm run guide "Name three colours" --json
    """
    from .commands.run import run as body

    return body(model, prompt, backend, quant, as_json, asked)


@cli.command(cls=WithSettings)
def serve(**overrides: Any) -> int:
    """Serve models to other programs, in this terminal.

    Runs the daemon, with its OpenAI-compatible endpoint, until Ctrl-C.
    chat and run start the daemon on their own when none runs. Each flag is a setting; localllm config shows them all.

    \b
    Examples:
      localllm serve
      localllm serve --port 8080 --idle-unload 0
      curl http://127.0.0.1:11811/v1/models
    """
    from .commands.daemon import serve as body

    return body(overrides)


@cli.command()
@json_flag
def ps(as_json: bool) -> int:
    """Show the models that are loaded now.

    \b
    Examples:
      localllm ps
      localllm ps --json
    """
    from .commands.daemon import ps as body

    return body(as_json)


@cli.command()
@default_model
def stop(model: str | None) -> int:
    """Unload a model, or stop the daemon.

    Without MODEL the daemon ends, after running answers had a few seconds to finish.

    \b
    Examples:
      localllm stop guide
      localllm stop
    """
    from .commands.daemon import stop as body

    return body(model)


@cli.command("list")
@json_flag
def list_(as_json: bool) -> int:
    """List the models on this machine.

    That is the built-in guide and what is whole in the Hugging Face cache.

    \b
    Examples:
      localllm list
      localllm list --json
    """
    from .commands.models import list_models as body

    return body(as_json)


@cli.command()
@click.argument("name", metavar="ORG/REPO[@REVISION]")
def pull(name: str) -> int:
    """Download a model from Hugging Face.

    It goes into the cache that other programs share; only safetensors weights are taken. Run it again to continue
    after an interruption. HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honoured.

    \b
    Examples:
      localllm pull Qwen/Qwen3-0.6B
      localllm pull Qwen/Qwen3-0.6B@main
    """
    from .commands.models import pull as body

    return body(name)


@cli.command()
@click.argument("name", type=Model(), metavar="ORG/REPO[@REVISION]")
@click.option("--packed", is_flag=True, help="Only the weights made smaller with --quant; the model stays.")
@click.option("--yes", is_flag=True, help="Do not ask first.")
def rm(name: str, packed: bool, yes: bool) -> int:
    """Delete a downloaded model.

    Asks first, and says how much disk space that frees.

    \b
    Examples:
      localllm rm Qwen/Qwen3-0.6B
      localllm rm Qwen/Qwen3-0.6B@main --yes
      localllm rm Qwen/Qwen3-0.6B --packed
    """
    from .commands.models import remove as body

    return body(name, packed, yes)


@cli.command()
@backend_flag
@click.option("--ops", is_flag=True, help="Show who computes each op instead.")
@json_flag
def doctor(backend: str | None, ops: bool, as_json: bool) -> int:
    """Say what this machine can run, and why not.

    Shows each backend, the choice among them, processor, memory, paths, the daemon and versions.

    \b
    Examples:
      localllm doctor
      localllm doctor --backend cpu
      localllm doctor --json
      localllm doctor --ops
    """
    from .commands.doctor import doctor as body

    return body(backend, ops, as_json)


@cli.command()
@default_model
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs to take medians of.")
@click.option(
    "--together",
    type=click.IntRange(2, 1000),
    multiple=True,
    default=(8, 32),
    show_default=True,
    help="Answers to ask for at once; may be repeated.",
)
@backend_flag
@quant_flag
@json_flag
def bench(
    model: str | None, rounds: int, together: tuple[int, ...], backend: str | None, quant: str | None, as_json: bool
) -> int:
    """Measure how fast a model answers here.

    Gives the time to the first token, reading and writing speed in tokens per second, alone and with several answers
    at once, each the median of several rounds; and, where the device can tell, how fast its memory is read and which
    share of that writing one answer makes of it.

    \b
    Examples:
      localllm bench
      localllm bench Qwen/Qwen3-0.6B --rounds 5 --json
      localllm bench --together 4 --together 64
    """
    from .commands.bench import bench as body

    return body(model, rounds, together, backend, quant, as_json)


@cli.command()
@backend_flag
@quant_flag
@json_flag
def selftest(backend: str | None, quant: str | None, as_json: bool) -> int:
    """Check that a backend computes right here.

    Asks the built-in model questions whose answers are known, one by one and all at once, from the prefix cache, with
    seeds and with a schema. What it prints is what we need to know when it fails, or to say that your hardware works.
    Ends with 1 when a check failed.

    \b
    Examples:
      localllm selftest
      localllm selftest --backend mlx --json
    """
    from .commands.selftest import selftest as body

    return body(backend, quant, as_json)


@cli.command()
@json_flag
def config(as_json: bool) -> int:
    """Show every setting, its value and its meaning.

    Also shows where each value comes from: the default, the settings file or an environment variable.

    \b
    Examples:
      localllm config
      LOCALLLM_PORT=8080 localllm config --json
    """
    from .commands.settings import config as body

    return body(as_json)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a shell completion script.

    \b
    Examples:
      localllm completion bash >> ~/.bashrc
      localllm completion zsh >> ~/.zshrc
      localllm completion fish > ~/.config/fish/completions/localllm.fish
    """
    from .commands.completion import completion as body

    return body(cli, shell)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    from .commands.console import guarded

    args = sys.argv[1:] if argv is None else argv
    return guarded(cli, args)


if __name__ == "__main__":
    sys.exit(main())
