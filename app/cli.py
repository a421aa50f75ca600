"""The command line: names, flags and help texts. A command imports its code when it runs, so that help is fast."""

from __future__ import annotations

import sys
from typing import Any

import click

from .parameters import (
    AdapterFiles,
    AliasName,
    AnyModel,
    LoadedAdapter,
    LoadedModel,
    Model,
    RemoteModel,
    StoredModel,
    WithSettings,
    backend_flag,
    default_model,
    json_flag,
    load_flags,
    load_of,
    quant_flag,
    sampling_flags,
)
from .version import VERSION

EPILOG = """Start with: localllm chat. Each command has --help with examples.

\b
Exit codes: 0 done, 1 failed or declined, 2 wrong usage, 3 not found, 4 not allowed,
5 model or backend cannot be used, 6 busy or stopping, 7 engine process died, 8 no daemon,
9 port taken, 10 download failed, 11 disk, 130 interrupted"""


# Section of localllm --help -> its commands.
SECTIONS = {
    "Chat": "chat run".split(),
    "Models": "search inspect fit pull list show alias import adapters verify rm prune".split(),
    "Daemon": "serve ps stop config completion".split(),
    "Check": "doctor selftest bench".split(),
}


class Sections(click.Group):
    """The group of all commands. Its help shows the commands in sections."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(100)) for name in names])


@click.group(
    cls=Sections,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)
@click.version_option(VERSION, message="localllm %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run language models on your own machine: chat in the terminal, or serve them over an API."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command()
@default_model
@sampling_flags
@load_flags
def chat(model: str | None, **flags: Any) -> int:
    """Chat with a model in the terminal.

    The default of MODEL is the setting `model`, which is the built-in model guide unless you change it. If standard
    input is not a terminal, each line of it is one message, and the answers are printed to standard output.

    \b
    Examples:
      localllm chat
      localllm chat Qwen/Qwen3-0.6B --system "Answer in one sentence."
      localllm chat ./model-Q4_K_M.gguf
      printf 'hi\\nwho are you?\\n' | localllm chat
    """
    from .commands.chat import chat as body

    return body(model, load_of(flags), flags)


@cli.command()
@click.argument("model", type=Model())
@click.argument("prompt", required=False)
@sampling_flags
@click.option(
    "--schema", type=click.File("rb"), metavar="FILE", help="Constrain the answer to JSON that fits this JSON schema."
)
@click.option("--regex", metavar="PATTERN", help="Constrain the answer to this regular expression.")
@load_flags
@json_flag
def run(model: str, prompt: str | None, as_json: bool, **flags: Any) -> int:
    """Answer one prompt and stream the answer.

    Piped input is appended to PROMPT. Without PROMPT, the piped input is the prompt. Inside a shell loop that reads a
    file, localllm run does not read the rest of that file. --json prints one object with text, finish, usage and
    timings.

    \b
    Examples:
      localllm run guide "How do I pull a model?"
      cat notes.txt | localllm run Qwen/Qwen3-0.6B "Summarise this:"
      localllm run guide "Name three colours" --json
    """
    from .commands.run import run as body

    return body(model, prompt, load_of(flags), as_json, flags)


@cli.command(cls=WithSettings)
def serve(**overrides: Any) -> int:
    """Serve an OpenAI-compatible API from this terminal.

    Runs the daemon until Ctrl-C. Without it, localllm chat and localllm run start a daemon in the background.
    Each flag overrides a setting; localllm config shows all settings.

    \b
    Examples:
      localllm serve
      localllm serve --port 8080 --idle-unload 0
      localllm serve --preload guide
      curl http://127.0.0.1:11811/v1/models
    """
    from .commands.daemon import serve as body

    return body(overrides)


@cli.command()
@json_flag
def ps(as_json: bool) -> int:
    """Show the loaded models.

    \b
    Examples:
      localllm ps
      localllm ps --json
    """
    from .commands.daemon import ps as body

    return body(as_json)


@cli.command()
@click.argument("model", type=LoadedModel(), required=False)
def stop(model: str | None) -> int:
    """Unload a model, or stop the daemon.

    Without MODEL, the daemon stops. Running answers then have a few seconds to finish.

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

    The list has the built-in model guide and the models in the Hugging Face cache. It also shows models that cannot be
    used, with the reason, and unfinished downloads.

    \b
    Examples:
      localllm list
      localllm list --json
    """
    from .commands.models import list_models as body

    return body(as_json)


@cli.command()
@click.argument("names", type=RemoteModel(), nargs=-1, required=True, metavar="NAME...")
@click.option("--yes", is_flag=True, help="Download without confirmation.")
@click.option("--anyway", is_flag=True, help="Also download a model that localllm cannot run, or damaged files.")
@click.option("--limit", type=click.FloatRange(min=0), default=0.0, metavar="MIB", help="Maximum speed in MiB/s.")
@json_flag
def pull(names: tuple[str, ...], yes: bool, anyway: bool, limit: float, as_json: bool) -> int:
    """Download models and adapters.

    Shows what it downloads and how much, and asks for confirmation on a terminal. The files are stored in the Hugging
    Face cache, which other programs share. Only safetensors and GGUF weights are downloaded, never pickle. The
    configuration or the header comes first: a model that no backend supports is refused before its weights. Every file
    is verified with the hash of the hub, and the model appears when all files are complete. After an interruption, run
    the command again to continue. With --json, each line of standard output is an event: plan, progress or complete.

    \b
    NAME is one of:
      qwen3:0.6b                       short name; localllm search lists them
      org/repo, org/repo@revision      repository of Hugging Face, or its branch, tag or commit
      ms:org/repo                      repository of ModelScope
      org/repo:Q4_K_M                  GGUF model; a repository with only GGUF files has a default
      https://huggingface.co/org/repo  page of a repository or of a weight file
      https://host/model.gguf          GGUF model of another host
      https://host/model.safetensors   one weight file of another host (--anyway: no complete model)

    The variables HF_TOKEN, HF_TOKEN_PATH, HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HTTPS_PROXY and NO_PROXY
    work as in huggingface_hub. HF_ENDPOINT may have several addresses with commas between them: mirrors, which are
    tried in this order. MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN are those of ModelScope.

    \b
    Examples:
      localllm pull qwen3:0.6b
      localllm pull Qwen/Qwen3-0.6B@main --limit 5
      localllm pull ms:Qwen/Qwen3-0.6B --yes
    """
    from .commands.pull import pull as body

    return body(names, yes=yes, anyway=anyway, as_json=as_json, limit=limit)


@cli.command()
@click.argument("name", type=AnyModel(), metavar="MODEL")
@json_flag
def inspect(name: str, as_json: bool) -> int:
    """Show the facts about a model before its download.

    The facts: architecture, size, licence, chat template, and the backends of this machine that run it.

    Reads only configuration files and the headers of weights. MODEL may also be an adapter, a folder or a GGUF file.
    The exit code is 5 if no backend of this machine runs the model, or if its files are damaged.

    \b
    Examples:
      localllm inspect Qwen/Qwen3-0.6B
      localllm inspect ./model.gguf --json
    """
    from .commands.inspect import inspect as body

    return body(name, as_json)


@cli.command()
@click.argument("name", type=AnyModel(), metavar="MODEL")
@click.option("--context", type=click.IntRange(min=0), default=0, help="Context in tokens; 0: the largest that fits.")
@click.option("--parallel", type=click.IntRange(1, 1024), default=1, help="Answers at the same time.")
@quant_flag
@backend_flag
@json_flag
def fit(name: str, context: int, parallel: int, quant: Any, backend: str | None, as_json: bool) -> int:
    """Show whether a model fits in memory, and how fast it is.

    Compares the weights, the KV cache (the memory of the context) and the adapters with the free memory of each
    backend, without loading the model. The speed is an estimate: the read bandwidth of the memory, which is measured,
    divided by the bytes of weights that a token reads. The memory of loaded models is not free; localllm stop MODEL
    frees it. The exit code is 5 if the model fits on no backend.

    \b
    Examples:
      localllm fit guide
      localllm fit Qwen/Qwen3-0.6B --context 8192 --parallel 4 --quant int4
    """
    from .commands.fit import fit as body

    return body(name, context, parallel, quant, backend, as_json)


@cli.command()
@click.argument("name", type=StoredModel(), metavar="NAME[@REVISION][:QUANT]")
@click.option("--packed", is_flag=True, help="Delete only the cached quantised weights; keep the model.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_flag
def rm(name: str, packed: bool, yes: bool, as_json: bool) -> int:
    """Delete a downloaded model.

    Shows the disk space that the deletion frees and the aliases that it removes, and asks for confirmation. Files that
    another revision uses stay. Also deletes an unfinished download. NAME:QUANT deletes one GGUF model of a repository.

    \b
    Examples:
      localllm rm Qwen/Qwen3-0.6B
      localllm rm Qwen/Qwen3-0.6B@main --yes
      localllm rm Qwen/Qwen3-0.6B --packed
    """
    from .commands.models import remove as body

    return body(name, packed, yes, as_json)


@cli.command()
@click.argument("name", type=StoredModel(), metavar="NAME")
@json_flag
def show(name: str, as_json: bool) -> int:
    """Show where a model comes from.

    Shows the repository, the revision, the time of the download, the hash of each file, the licence, the state of the
    chat template, the aliases and the settings of a model or an adapter.

    \b
    Examples:
      localllm show guide
      localllm show Qwen/Qwen3-0.6B --json
    """
    from .commands.store import show as body

    return body(name, as_json)


@cli.command()
@click.argument("names", type=StoredModel(), nargs=-1, metavar="[NAME]...")
@json_flag
def verify(names: tuple[str, ...], as_json: bool) -> int:
    """Compare the files of models with their hashes.

    Without NAME, verifies all models and adapters. The exit code is 1 if a file is damaged or missing.

    \b
    Examples:
      localllm verify
      localllm verify Qwen/Qwen3-0.6B
    """
    from .commands.store import verify as body

    return body(names, as_json)


@cli.command()
@click.option("--dry-run", is_flag=True, help="Only show what can be deleted.")
@click.option("--all", "everything", is_flag=True, help="Include files that changed in the last 24 hours.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_flag
def prune(dry_run: bool, everything: bool, yes: bool, as_json: bool) -> int:
    """Delete files in the cache that nothing uses.

    These are unfinished downloads, also those of other programs, and files that no model uses any more. Shows them and
    asks for confirmation. Without a terminal, deletes them only with --yes. Downloads that run now are not touched.

    \b
    Examples:
      localllm prune --dry-run
      localllm prune --yes
    """
    from .commands.store import prune as body

    return body(dry_run, yes, everything, as_json)


@cli.command("import")
@click.argument("path", type=click.Path(), metavar="PATH")
@click.option("--name", default="", metavar="NAME", help="Name after local/; default: that of the folder or file.")
@click.option("--copy", is_flag=True, help="Copy the files; default: links to the files.")
@json_flag
def import_(path: str, name: str, copy: bool, as_json: bool) -> int:
    """Add a folder or a GGUF file to the list of models.

    The model gets the name local/NAME. The store has links to the files at PATH, or copies of them with --copy.
    localllm rm deletes the links or copies, never the files at PATH. PATH is the folder of a complete model or adapter,
    or a GGUF file; all its shards are added.

    \b
    Examples:
      localllm import ./my-model
      localllm import /mnt/models/my-model --name mine --copy
      localllm import ./model-Q4_K_M.gguf
    """
    from .commands.store import import_ as body

    return body(path, name, copy, as_json)


@cli.command()
@click.argument("name", type=AliasName(), required=False)
@click.argument("model", type=AnyModel(), required=False)
@click.option("--rm", "remove", is_flag=True, help="Remove the alias.")
@json_flag
def alias(name: str | None, model: str | None, remove: bool, as_json: bool) -> int:
    """Give a model another name.

    Without NAME, shows all aliases. Every command and the API accept an alias as the name of a model.

    \b
    Examples:
      localllm alias small Qwen/Qwen3-0.6B
      localllm alias
      localllm alias small --rm
    """
    from .commands.store import alias as body

    return body(name, model, remove, as_json)


@cli.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option(
    "--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Repositories of each format."
)
@click.option("--offline", is_flag=True, help="Search only the catalog of short names.")
@json_flag
def search(words: tuple[str, ...], limit: int, offline: bool, as_json: bool) -> int:
    """Find models to download.

    Searches the catalog of short names, and Hugging Face. Without WORD, shows the catalog. Sizes are approximate.
    Repositories with safetensors weights and with GGUF models have a table each. `localllm pull org/repo:QUANT`
    downloads a GGUF model.

    \b
    Examples:
      localllm search
      localllm search qwen3 awq
      localllm search qwen3 gguf
      localllm search llama --offline
    """
    from .commands.store import search as body

    return body(words, limit, offline, as_json)


@cli.group(invoke_without_command=True)
@click.pass_context
def adapters(ctx: click.Context) -> None:
    """Manage LoRA adapters: list, load, unload and delete them.

    An adapter changes a model without a second copy of its weights. It is loaded and unloaded while the model answers.
    Requests select an adapter with the model name MODEL:ADAPTER. The commands chat and run have the flag --adapter.

    \b
    Examples:
      localllm adapters load ./pirate --model guide
      localllm adapters list
      localllm chat guide --adapter pirate=0.5
      localllm adapters unload pirate
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@adapters.command("list")
@json_flag
def adapters_list(as_json: bool) -> int:
    """List the loaded and the downloaded adapters.

    \b
    Examples:
      localllm adapters list
      localllm adapters list --json
    """
    from .commands.adapters import list_adapters as body

    return body(as_json)


@adapters.command("load")
@click.argument("adapter", type=AdapterFiles(), metavar="FOLDER|FILE|ORG/REPO")
@click.option("--name", metavar="NAME", help="Name for requests; default: the name of the folder or repo.")
@click.option(
    "--model", type=Model(), metavar="MODEL", help="Base model; default: the loaded model, or the setting model."
)
@click.option("--replace", is_flag=True, help="Replace a loaded adapter of the same name.")
@click.option("--pin", is_flag=True, help="Keep the adapter on the device, even if other adapters need its place.")
@json_flag
def adapters_load(adapter: str, name: str | None, model: str | None, replace: bool, pin: bool, as_json: bool) -> int:
    """Load an adapter for a model.

    The files are those of PEFT or mlx-lm (safetensors), also for a GGUF model, which takes adapters in GGUF files too.
    A folder begins with /, ./, ../ or ~; another name is an adapter in the Hugging Face cache. The adapter stays
    loaded until it or its model is unloaded.

    \b
    Examples:
      localllm adapters load ./pirate --model guide
      localllm adapters load ./pirate --model ./model.gguf
      localllm adapters load org/pirate-lora --name pirate --replace
    """
    from .commands.adapters import load as body

    return body(adapter, name, model, replace, pin, as_json)


@adapters.command("unload")
@click.argument("name", type=LoadedAdapter())
@click.option("--model", type=Model(), metavar="MODEL", help="Base model; needed if several have such an adapter.")
@json_flag
def adapters_unload(name: str, model: str | None, as_json: bool) -> int:
    """Unload an adapter.

    Answers that use the adapter go on.

    \b
    Examples:
      localllm adapters unload pirate
      localllm adapters unload pirate --model guide
    """
    from .commands.adapters import unload as body

    return body(name, model, as_json)


@adapters.command("rm")
@click.argument("name", type=AdapterFiles(), metavar="ORG/REPO[@REVISION]")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_flag
def adapters_rm(name: str, yes: bool, as_json: bool) -> int:
    """Delete a downloaded adapter.

    Deletes only files in the Hugging Face cache. Shows the disk space that the deletion frees, and asks for
    confirmation.

    \b
    Examples:
      localllm adapters rm org/pirate-lora
      localllm adapters rm org/pirate-lora --yes
    """
    from .commands.adapters import remove as body

    return body(name, yes, as_json)


@cli.command()
@backend_flag
@click.option(
    "--ops", is_flag=True, help="Show the implementation of each op (norm, attention, ...) instead of the report."
)
@click.option(
    "--trace", "model", type=Model(), metavar="MODEL", help="Show the ops that two short answers of a model call."
)
@json_flag
def doctor(backend: str | None, ops: bool, model: str | None, as_json: bool) -> int:
    """Show the backends of this machine and their problems.

    Also shows the selected backend, the processor, the memory, the folders, the state of the daemon, and versions.

    \b
    Examples:
      localllm doctor
      localllm doctor --backend cpu
      localllm doctor --json
      localllm doctor --ops
      localllm doctor --ops --trace guide
    """
    from .commands.doctor import doctor as body

    return body(backend, ops, model, as_json)


@cli.command()
@default_model
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Number of measurements of each figure; the result is their median.",
)
@click.option(
    "--together",
    type=click.IntRange(2, 1000),
    multiple=True,
    default=(8, 32),
    show_default=True,
    help="Number of parallel answers. The flag may be repeated.",
)
@backend_flag
@quant_flag
@json_flag
def bench(
    model: str | None, rounds: int, together: tuple[int, ...], backend: str | None, quant: str | None, as_json: bool
) -> int:
    """Measure the speed of a model on this machine.

    Measures the time to the first token, and prefill and decode speed in tokens per second, for one answer and for
    several in parallel. Each result is the median of several rounds. On some devices the command also measures the
    read bandwidth of the device memory, and the fraction of this bandwidth that decode uses.

    \b
    Examples:
      localllm bench
      localllm bench Qwen/Qwen3-0.6B --rounds 5 --json
      localllm bench --together 4 --together 64
    """
    from .commands.bench import bench as body

    return body(model, rounds, together, {"backend": backend, "quant": quant}, as_json)


@cli.command()
@backend_flag
@quant_flag
@json_flag
def selftest(backend: str | None, quant: str | None, as_json: bool) -> int:
    """Check that a backend computes correctly on this machine.

    Asks the built-in model questions with known answers: one by one, in parallel, with a cached prompt, with seeds and
    with a JSON schema. Please attach the output to a bug report, or send it to confirm that your hardware works.
    The exit code is 1 if a check failed.

    \b
    Examples:
      localllm selftest
      localllm selftest --backend mlx --json
    """
    from .commands.selftest import selftest as body

    return body({"backend": backend, "quant": quant}, as_json)


@cli.command()
@default_model
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@json_flag
def config(model: str | None, changes: tuple[str, ...], as_json: bool) -> int:
    """Show settings, or change those of all models or of one.

    Without MODEL and changes, shows every setting with its value, its meaning and the source of its value: the default,
    the settings file or an environment variable. NAME=VALUE without MODEL changes the settings file.
    With MODEL, shows and changes the settings of this model, which apply when it is loaded. NAME= removes a setting.
    A setting of a model overrides that of all models; a flag of run, chat and serve overrides both.

    \b
    Examples:
      localllm config
      localllm config quant=int8 port=8080
      localllm config guide quant=int8 context=2048
      localllm config guide quant=
      LOCALLLM_PORT=8080 localllm config --json
    """
    from .commands.settings import config as body

    return body(model, changes, as_json)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a shell completion script.

    With this script, the shell completes commands, flags and model names when you press Tab.

    \b
    Examples:
      localllm completion bash >> ~/.bashrc
      localllm completion zsh >> ~/.zshrc
      localllm completion fish > ~/.config/fish/completions/localllm.fish
    """
    from .commands.completion import completion as body

    return body(cli, shell)


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns the exit code."""
    from .start import run

    return run(cli, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
