"""Settings from the file, the environment and flags, and the errors of invalid settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localllm.app import config
from localllm.app.developer import Developer
from localllm.app.errors import ConfigError
from localllm.kernels.compiled.library import CPU_VARIABLE, CUDA_VARIABLE
from localllm.kernels.gpu.limits import VARIABLES as GPU_VARIABLES


def load(text: str, tmp_path: Path, env: dict[str, str] | None = None, **flags: object) -> config.Settings:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return config.load(flags, env or {}, file)


def test_defaults_need_no_file(tmp_path: Path) -> None:
    assert config.load({}, {}, tmp_path / "none.toml") == config.Settings()


def test_flag_overrides_environment_and_environment_overrides_file(tmp_path: Path) -> None:
    text = 'port = 1000\nmodel = "a"\nhost = "::1"\nallowed_hosts = ["x.example"]'
    settings = load(text, tmp_path, {"LOCALLLM_PORT": "2000", "LOCALLLM_MODEL": "b"}, port=3000, model=None)
    assert (settings.port, settings.model, settings.host) == (3000, "b", "::1")
    assert settings.allowed_hosts == ("x.example",)


@pytest.mark.parametrize("variable", ["LOCALLLM_CONFIG", "LOCALLLM_CUDA_LIBRARY"])
def test_path_and_kernel_variables_are_not_settings(tmp_path: Path, variable: str) -> None:
    (tmp_path / "x").touch()
    assert config.load(env={variable: str(tmp_path / "x")}, file=tmp_path / "none") == config.Settings()


@pytest.mark.parametrize("variable", ["LOCALLLM_CPU_LIBRARY", "LOCALLLM_CUDA_LIBRARY"])
def test_variable_of_a_library_that_is_not_there_is_refused(tmp_path: Path, variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable} names .*none\.so, which is not a file"):
        config.load(env={variable: str(tmp_path / "none.so")}, file=tmp_path / "none")


def test_lists_in_the_environment_are_separated_by_commas(tmp_path: Path) -> None:
    assert load("", tmp_path, {"LOCALLLM_ALLOWED_HOSTS": "a, b,,"}).allowed_hosts == ("a", "b")


def test_number_in_the_environment_has_the_type_of_the_setting(tmp_path: Path) -> None:
    settings = load("", tmp_path, {"LOCALLLM_IDLE_UNLOAD": "1.5", "LOCALLLM_ROPE_SCALE": "0", "LOCALLLM_THREADS": "3"})
    assert (settings.idle_unload, settings.rope_scale, settings.threads) == (1.5, 0.0, 3)


def test_explain_gives_the_source_of_each_value(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("port = 1\nidle_unload = 1.0\nmodel = 'a'")
    env = {"LOCALLLM_PORT": "2", "LOCALLLM_IDLE_UNLOAD": "2"}
    assert config.explain({"port": 3, "quant": None, "max_rows": 9}, env, file)[1] == {
        "port": "--port",
        "idle_unload": "LOCALLLM_IDLE_UNLOAD",
        "model": str(file),
        "max_rows": "--max-rows",
    }


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("port = 0", True),
        ("port = 65535", True),
        ("port = 65536", False),
        ("rope_scale = 1000000", True),
        ("rope_scale = 1000001", False),
        ("max_rows = 1", True),
        ("max_queue = 0", False),
        ("idle_unload = 0", True),
        ("context = -1", False),
        ("threads = -1", False),
    ],
)
def test_values_out_of_range_are_rejected(text: str, good: bool, tmp_path: Path) -> None:
    if good:
        load(text, tmp_path)
        return
    with pytest.raises(ConfigError, match=text.split()[0]):
        load(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "env", "flags", "says"),
    [
        ("prot = 1", {}, {}, "unknown setting 'prot'"),
        ("port = 'x'", {}, {}, "port in"),
        ("port = -1", {}, {}, "port in"),
        ("port = true", {}, {}, "port in"),
        ("max_rows = 0", {}, {}, "max_rows in"),
        ("idle_unload = nan", {}, {}, "idle_unload in"),
        ("dtype = 'int4'", {}, {}, "dtype in"),
        ("allowed_hosts = [1]", {}, {}, "allowed_hosts in"),
        ("[port]\nx = 1", {}, {}, "port in"),
        ("port =", {}, {}, "config.toml"),
        ("", {"LOCALLLM_PORT": "eighty"}, {}, "LOCALLLM_PORT: expected a number, got 'eighty'"),
        ("", {"LOCALLLM_PORT": "1.5"}, {}, "LOCALLLM_PORT: expected a number"),
        ("", {"LOCALLLM_PROT": "1"}, {}, "unknown setting 'prot' in LOCALLLM_PROT"),
        ("", {"LOCALLLM_DEV_DRAIN": "-1"}, {}, "drain in LOCALLLM_DEV_DRAIN"),
        ("", {}, {"max_queue": 0}, "max_queue in --max-queue"),
        ("", {}, {"colour": 1}, "unknown setting 'colour' in --colour"),
        ("allowed_origins = ['*']", {}, {}, "'*': patterns are not supported"),
        ("allowed_origins = ['https://a.example', 'http://*.example']", {}, {}, "'http://*.example': patterns"),
        ("allowed_origins = ['https://a.example/x']", {}, {}, "an origin is SCHEME://HOST"),
        ("", {"LOCALLLM_ALLOWED_ORIGINS": "https://localhost:*"}, {}, "allowed_origins in LOCALLLM_ALLOWED_ORIGINS"),
        ("", {}, {"allowed_origins": ["null"]}, "allowed_origins in --allowed-origins: 'null'"),
        ("allowed_hosts = ['*']", {}, {}, "allowed_hosts in"),
        ("allowed_hosts = ['box.lan:80']", {}, {}, "a host name has no port"),
        ("", {"LOCALLLM_ALLOWED_HOSTS": "http://box.lan"}, {}, "allowed_hosts in LOCALLLM_ALLOWED_HOSTS"),
    ],
)
def test_invalid_settings_are_rejected_by_name(
    text: str, env: dict[str, str], flags: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, tmp_path, env, **flags)
    assert says in caught.value.message
    assert caught.value.hint


def test_binary_settings_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        config.load({}, {}, tmp_path / "config.toml")


def test_unknown_setting_gets_a_similar_name_as_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("idle_unlaod = 1", tmp_path)
    assert caught.value.hint == "did you mean idle_unload?"


def test_developer_options_are_environment_variables_only(tmp_path: Path) -> None:
    env = {"LOCALLLM_DEV_OPS": "norm=reference, rope=cpp", "LOCALLLM_DEV_SELF_TEST": "off", "LOCALLLM_PORT": "3"}
    settings = load("", tmp_path, env)
    assert settings.developer == Developer(ops=("norm=reference", "rope=cpp"), self_test="off")
    assert settings.port == 3
    for text, env in (('lora_backend = "cpp"', {}), ("", {"LOCALLLM_LORA_BACKEND": "cpp"})):
        with pytest.raises(ConfigError, match="developer option") as caught:
            load(text, tmp_path, env)
        assert caught.value.hint == "set the environment variable LOCALLLM_DEV_LORA_BACKEND"
    for text in ("[developer]\nattention = 'ours'", "dev_attention = 'ours'"):
        with pytest.raises(ConfigError, match="unknown setting"):
            load(text, tmp_path)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("LOCALLLM_DEV_ATENTION", "ours", "unknown setting 'atention' in LOCALLLM_DEV_ATENTION"),
        ("LOCALLLM_DEV_SELF_TEST", "never", "self_test in LOCALLLM_DEV_SELF_TEST"),
        ("LOCALLLM_DEV_PORT", "3", "unknown setting 'port' in LOCALLLM_DEV_PORT"),
        ("LOCALLLM_DEV_CUDA_SHARES", "1", "unknown setting 'cuda_shares' in LOCALLLM_DEV_CUDA_SHARES"),
        ("LOCALLLM_DEV_CUDA_MEMORY", "8 GiB", "LOCALLLM_DEV_CUDA_MEMORY=8 GiB: a size such as 8GiB"),
    ],
)
def test_unknown_developer_option_is_rejected_by_name(variable: str, text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", tmp_path, {variable: text})
    assert says in caught.value.message
    assert caught.value.hint


def test_valid_limits_of_the_gpu_are_left_to_the_kernels(tmp_path: Path) -> None:
    env = {"LOCALLLM_DEV_CUDA_CAPABILITY": "8.6", "LOCALLLM_DEV_CUDA_MEMORY": "8GiB"}
    assert load("", tmp_path, env) == load("", tmp_path, {})


def test_every_setting_has_a_description() -> None:
    described = config.describe()
    assert [*(setting.name for setting in described), "developer", "flags", "own"] == list(
        config.Settings.__struct_fields__
    )
    assert [setting.name for setting in config.describe(Developer)] == list(Developer.__struct_fields__)
    for setting in described:
        assert setting.sentence.endswith("."), setting.name
        assert setting.default == getattr(config.Settings(), setting.name)
    assert described[2].choices == ("auto", "bfloat16", "float32")


def test_defaults_of_all_settings() -> None:
    assert msgspec.structs.asdict(config.Settings()) == {
        "model": "guide",
        "backend": "auto",
        "dtype": "auto",
        "cache_dtype": "auto",
        "cache_layout": "shared",
        "quant": "none",
        "context": 0,
        "cache_mib": 0,
        "max_rows": 64,
        "graphs": "auto",
        "developer": Developer(
            compiler="inductor",
            attention="auto",
            lora_backend="auto",
            self_test="on",
            streams="measured",
            ops=(),
            drain=5.0,
            max_body_mib=16,
            step_timeout=0.0,
        ),
        "threads": 0,
        "gpu_layers": -1,
        "rope_scaling": "auto",
        "rope_scale": 0.0,
        "rope_base": 0.0,
        "adapter_slots": 8,
        "adapter_rank": 16,
        "host": "127.0.0.1",
        "port": 11811,
        "ollama_port": 0,
        "api_key": "",
        "allowed_hosts": (),
        "allowed_origins": (),
        "idle_unload": 900.0,
        "max_queue": 256,
        "strict_fields": False,
        "preload": (),
        "flags": (),
        "own": (),
    }


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        *((name, 0) for name in ("context", "cache_mib", "rope_scale", "threads", "port", "idle_unload")),
        ("gpu_layers", -1),
        *((name, 1) for name in ("max_rows", "max_queue")),
    ],
)
def test_minimum_of_every_number(name: str, minimum: int, tmp_path: Path) -> None:
    assert getattr(load(f"{name} = {minimum}", tmp_path), name) == minimum
    with pytest.raises(ConfigError) as caught:
        load(f"{name} = {minimum - 1}", tmp_path)
    (described,) = [setting for setting in config.describe() if setting.name == name]
    assert caught.value.hint == described.meaning


def test_flag_and_variable_name_of_a_setting() -> None:
    described = {setting.name: setting for setting in config.describe()}
    quant, port = described["quant"], described["port"]
    assert (quant.env, quant.flag) == ("LOCALLLM_QUANT", "--quant")
    assert described["cache_mib"].flag == "--cache-mib"
    assert quant.meaning == f"{quant.sentence} One of: fp8, fp8_w8a8, int4, int8, none."
    assert (port.meaning, port.choices) == (port.sentence, ())


@pytest.mark.parametrize("variable", sorted(config.OTHER_VARIABLES - {*GPU_VARIABLES, CPU_VARIABLE, CUDA_VARIABLE}))
def test_other_localllm_variables_are_ignored(tmp_path: Path, variable: str) -> None:
    assert config.explain(env={variable: "x", "OTHER_PORT": "1"}, file=tmp_path / "none") == (config.Settings(), {})
    with pytest.raises(ConfigError) as caught:
        config.load(env={"LOCALLLM_ZZZZ": "x"}, file=tmp_path / "none")
    assert caught.value.hint.startswith("the settings are model, ")


def test_flags_of_a_command_are_named() -> None:
    assert config.load({"quant": "int8", "port": None}, env={"LOCALLLM_CONTEXT": "64"}).flags == ("quant",)
    with pytest.raises(ConfigError, match="flags"):
        config.load(env={"LOCALLLM_FLAGS": "quant"})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"qant": "int4"}, "unknown setting 'qant' in the settings of org/m"),
        ({"port": 1}, "unknown setting 'port'"),
        ({"quant": "int3"}, "quant in the settings of org/m"),
        ({"context": "many"}, "context in the settings of org/m"),
        ({"context": -1}, "context in the settings of org/m"),
    ],
)
def test_wrong_setting_of_a_model_is_an_error_that_names_it(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        config.model_settings({"org/m": values}, "org/m")
    assert refused.value.hint


def test_revision_has_the_settings_of_its_repository() -> None:
    tables = {"org/m": {"quant": "int8", "context": 64}, "org/m@v1": {"quant": "int4"}}
    assert config.model_settings(tables, "org/m@v1") == {"quant": "int4", "context": 64}
    assert config.model_settings(tables, "org/m") == {"quant": "int8", "context": 64}
    assert config.model_settings(tables, "org/other") == {}
