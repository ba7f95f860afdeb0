//! `continue_final_message`: the prompt ends inside the last message, for the model to go on with.
//!
//! As transformers does it (utils/chat_template_utils.py, `render_jinja_template`): a marker is put
//! behind the message, the chat is rendered whole, and everything from the marker on is cut off. So
//! whatever the template puts before, around or into a message comes out right.

use lockstep_core::Refusal;
use serde_json::Value;

/// The trailing space tells a template that trims its messages from one that does not.
const MARKER: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A message that waits to be continued.
pub(super) struct Prefill {
    /// The message's own text.
    text: String,
}

impl Prefill {
    /// Marks the end of `field` (`content`, or a field with reasoning) of the last message.
    pub(super) fn mark(messages: &mut Value, field: &str) -> Result<Self, Refusal> {
        let last = messages.as_array_mut().and_then(|list| list.last_mut());
        let value = last.and_then(|message| message.get_mut(field)).and_then(text_slot);
        let Some(slot) = value else {
            return Err(refusal(&format!("the last message has no text in `{field}` to continue")));
        };
        let text = slot.clone();
        slot.push_str(MARKER);
        Ok(Self { text })
    }

    /// Cuts a rendered chat where the message ends.
    pub(super) fn cut(&self, mut rendered: String) -> Result<String, Refusal> {
        let at = rendered.rfind(MARKER.trim_end()).filter(|_| rendered.contains(self.text.trim()));
        let Some(at) = at else {
            return Err(refusal(
                "the model's chat template does not write the last message out as it is, so it cannot be \
                 continued",
            ));
        };
        let keeps_spaces = rendered[at..].starts_with(MARKER);
        rendered.truncate(at);
        if !keeps_spaces {
            rendered.truncate(rendered.trim_end().len());
        }
        Ok(rendered)
    }
}

/// The text of a content: itself, or its last text part.
fn text_slot(value: &mut Value) -> Option<&mut String> {
    match value {
        Value::String(text) => Some(text),
        Value::Array(parts) => {
            parts.iter_mut().rev().find_map(|part| part.get_mut("text")).and_then(text_slot)
        }
        _ => None,
    }
}

fn refusal(why: &str) -> Refusal {
    Refusal::invalid_param("continue_final_message", format!("{why}; send it without continue_final_message"))
}
