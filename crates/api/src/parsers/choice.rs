//! Which parsers a model needs, by name or from its chat template.

use super::event::IdStyle;

/// A family's way to write tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3.
    Hermes,
    /// `{"name": ..., "parameters": {...}}`, alone or behind `<|python_tag|>`: Llama 3.1 to 3.3.
    Llama3Json,
    /// `[TOOL_CALLS]` with a JSON list, or name and arguments: Mistral.
    Mistral,
    /// `[f(a=1), g()]`, alone or between `<|python_start|>` and `<|python_end|>`: Llama 4 and others.
    Pythonic,
    /// `functools[{...}]` or `<|tool_call|>{...}<|/tool_call|>`: Phi-4-mini.
    Phi4Mini,
    /// `<｜tool▁calls▁begin｜>...`: DeepSeek V3, R1 and V3.1.
    DeepSeek,
    /// `<|tool_calls_section_begin|>...`: Kimi K2.
    KimiK2,
    /// `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen3-Coder.
    Qwen3Coder,
    /// `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`: GLM 4.5 to 4.7.
    Glm,
}

/// A family's tags around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>` and `</think>`: Qwen 3, GLM, SmolLM3 and many more.
    Think,
    /// The same tags, with the first one in the prompt: DeepSeek R1 and its distillations, QwQ.
    DeepSeekR1,
    /// `[THINK]` and `[/THINK]`: Magistral.
    Mistral,
    /// `◁think▷` and `◁/think▷`: Kimi.
    Kimi,
}

/// What `--tool-call-parser` and `--reasoning-parser` take: every name with its parser. The first
/// name of a parser is its own, further ones are those of other engines.
pub const TOOL_CALL_PARSERS: &[(&str, ToolFormat)] = &[
    ("hermes", ToolFormat::Hermes),
    ("qwen", ToolFormat::Hermes),
    ("qwen25", ToolFormat::Hermes),
    ("llama3_json", ToolFormat::Llama3Json),
    ("llama3", ToolFormat::Llama3Json),
    ("mistral", ToolFormat::Mistral),
    ("pythonic", ToolFormat::Pythonic),
    ("llama4_pythonic", ToolFormat::Pythonic),
    ("phi4_mini_json", ToolFormat::Phi4Mini),
    ("deepseek_v3", ToolFormat::DeepSeek),
    ("deepseek_v31", ToolFormat::DeepSeek),
    ("deepseekv3", ToolFormat::DeepSeek),
    ("deepseekv31", ToolFormat::DeepSeek),
    ("kimi_k2", ToolFormat::KimiK2),
    ("qwen3_coder", ToolFormat::Qwen3Coder),
    ("qwen3_xml", ToolFormat::Qwen3Coder),
    ("glm", ToolFormat::Glm),
    ("glm45", ToolFormat::Glm),
    ("glm47", ToolFormat::Glm),
];

/// See [`TOOL_CALL_PARSERS`].
pub const REASONING_PARSERS: &[(&str, ReasoningFormat)] = &[
    ("think", ReasoningFormat::Think),
    ("qwen3", ReasoningFormat::Think),
    ("glm45", ReasoningFormat::Think),
    ("deepseek_r1", ReasoningFormat::DeepSeekR1),
    ("deepseek-r1", ReasoningFormat::DeepSeekR1),
    ("qwen3-thinking", ReasoningFormat::DeepSeekR1),
    ("mistral", ReasoningFormat::Mistral),
    ("kimi", ReasoningFormat::Kimi),
];

impl ToolFormat {
    /// The format called `name` in [`TOOL_CALL_PARSERS`].
    pub fn from_name(name: &str) -> Option<Self> {
        TOOL_CALL_PARSERS.iter().find(|(n, _)| *n == name).map(|(_, format)| *format)
    }

    /// The format's own name.
    pub fn name(self) -> &'static str {
        TOOL_CALL_PARSERS.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }

    pub(super) fn id_style(self) -> IdStyle {
        if self == Self::Mistral { IdStyle::Nine } else { IdStyle::Call }
    }

    /// The markers are special tokens in these models' vocabularies, so the answer must be decoded with
    /// `skip_special_tokens` false for the parser to see them.
    pub fn needs_special_tokens(self) -> bool {
        !matches!(self, Self::Hermes | Self::Qwen3Coder | Self::Glm)
    }
}

impl ReasoningFormat {
    /// The format called `name` in [`REASONING_PARSERS`].
    pub fn from_name(name: &str) -> Option<Self> {
        REASONING_PARSERS.iter().find(|(n, _)| *n == name).map(|(_, format)| *format)
    }

    /// The format's own name.
    pub fn name(self) -> &'static str {
        REASONING_PARSERS.iter().find(|(_, format)| *format == self).map_or("", |(name, _)| name)
    }

    /// As [`ToolFormat::needs_special_tokens`].
    pub fn needs_special_tokens(self) -> bool {
        matches!(self, Self::Mistral | Self::Kimi)
    }

    /// What ends reasoning in the text.
    pub fn close(self) -> &'static str {
        self.tags().close
    }

    pub(super) fn tags(self) -> super::reasoning::Tags {
        let (open, close) = match self {
            Self::Think | Self::DeepSeekR1 => ("<think>", "</think>"),
            Self::Mistral => ("[THINK]", "[/THINK]"),
            Self::Kimi => ("◁think▷", "◁/think▷"),
        };
        super::reasoning::Tags { open, close }
    }
}

/// Whether prompts end inside reasoning, so that answers need no opening tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Opening {
    /// The model opens its reasoning itself.
    #[default]
    Never,
    /// Unless the request turns thinking off.
    Always,
    /// When the request turns thinking on (DeepSeek V3.1).
    OnRequest,
}

/// The parsers of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParserChoice {
    /// `None`: answers hold no tool calls.
    pub tools: Option<ToolFormat>,
    /// `None`: answers hold no reasoning.
    pub reasoning: Option<ReasoningFormat>,
    /// What the template's prompts end with.
    pub opening: Opening,
}

impl ParserChoice {
    /// The same with the parsers that the user named (`--tool-call-parser`, `--reasoning-parser`).
    pub fn with(mut self, tools: Option<ToolFormat>, reasoning: Option<ReasoningFormat>) -> Self {
        self.tools = tools.or(self.tools);
        self.reasoning = reasoning.or(self.reasoning);
        if reasoning == Some(ReasoningFormat::DeepSeekR1) && self.opening == Opening::Never {
            self.opening = Opening::Always;
        }
        self
    }

    /// Whether the answer to a request begins inside reasoning: as the template's prompts end, the
    /// request's `chat_template_kwargs` considered. A message to continue is taken to be past it.
    pub fn begins_in_reasoning(&self, kwargs: &serde_json::Map<String, serde_json::Value>) -> bool {
        let flag = |name: &str| kwargs.get(name).and_then(serde_json::Value::as_bool);
        if flag("continue_final_message") == Some(true) {
            return false;
        }
        // `enable_thinking` is Qwen's and GLM's name, `thinking` DeepSeek's and Granite's.
        let asked = flag("enable_thinking").or_else(|| flag("thinking"));
        match self.opening {
            Opening::Never => false,
            Opening::Always => asked != Some(false),
            Opening::OnRequest => asked == Some(true),
        }
    }
}

/// Chooses parsers from the text of the model's chat templates, which shows how calls and reasoning of
/// earlier turns are written, and where that says nothing from the model's name.
pub fn detect(template_text: &str, model_name: &str) -> ParserChoice {
    let name = model_name.to_lowercase();
    let reasoning = reasoning_of(template_text);
    ParserChoice {
        tools: tools_by_template(template_text).or_else(|| tools_by_name(&name)),
        opening: reasoning.map_or(Opening::Never, |format| opening(template_text, format)),
        reasoning,
    }
}

fn tools_by_template(text: &str) -> Option<ToolFormat> {
    let has = |marker: &str| text.contains(marker);
    Some(match () {
        () if has("<｜tool▁calls▁begin｜>") => ToolFormat::DeepSeek,
        () if has("<|tool_calls_section_begin|>") => ToolFormat::KimiK2,
        () if has("[TOOL_CALLS]") => ToolFormat::Mistral,
        () if has("functools") || has("<|tool_call|>") || has("<|/tool|>") => ToolFormat::Phi4Mini,
        () if has("<|python_start|>") || has("func_name1(") => ToolFormat::Pythonic,
        // Qwen3-Coder and GLM put their own tags into Hermes'.
        () if has("<function=") => ToolFormat::Qwen3Coder,
        () if has("<arg_key>") => ToolFormat::Glm,
        () if has("<tool_call>") => ToolFormat::Hermes,
        () if has("<|python_tag|>") || (has("ipython") && has("\"parameters\": ")) => ToolFormat::Llama3Json,
        () => return None,
    })
}

fn tools_by_name(name: &str) -> Option<ToolFormat> {
    let has = |word: &str| name.contains(word);
    Some(match () {
        () if has("coder") && has("qwen3") => ToolFormat::Qwen3Coder,
        () if has("deepseek") && (has("v3") || has("r1")) && !has("distill") => ToolFormat::DeepSeek,
        () if has("kimi-k2") => ToolFormat::KimiK2,
        () if has("glm-4.") => ToolFormat::Glm,
        () if has("hermes") || has("qwen2.5") || has("qwen3") => ToolFormat::Hermes,
        () if has("llama-4") => ToolFormat::Pythonic,
        () if has("llama-3.") => ToolFormat::Llama3Json,
        () if has("mistral") || has("ministral") || has("magistral") => ToolFormat::Mistral,
        () if has("phi-4-mini") => ToolFormat::Phi4Mini,
        () => return None,
    })
}

fn reasoning_of(text: &str) -> Option<ReasoningFormat> {
    let candidates = [ReasoningFormat::Think, ReasoningFormat::Mistral, ReasoningFormat::Kimi];
    let shown = |format: &ReasoningFormat| text.contains(format.tags().close);
    let format = candidates.into_iter().find(shown)?;
    let is_r1 = format == ReasoningFormat::Think && opening(text, format) == Opening::Always;
    Some(if is_r1 { ReasoningFormat::DeepSeekR1 } else { format })
}

/// What the template writes behind the last `add_generation_prompt`: an opening tag without its closing
/// one, perhaps only if a variable `thinking` is on, which it is not by default.
fn opening(text: &str, format: ReasoningFormat) -> Opening {
    let tags = format.tags();
    let tail = text.rfind("add_generation_prompt").map_or("", |at| &text[at..]);
    let Some(at) = tail.find(tags.open) else { return Opening::Never };
    let behind = tail[at + tags.open.len()..].replace("\\n", "\n");
    match () {
        () if behind.trim_start().starts_with(tags.close) => Opening::Never,
        () if tail[..at].contains("not thinking") => Opening::OnRequest,
        () => Opening::Always,
    }
}
