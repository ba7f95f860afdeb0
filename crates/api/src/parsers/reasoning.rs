//! Splits a model's reasoning from its answer, at tags like `<think>` and `</think>`.
//!
//! One block of reasoning, at the start of the answer; tags further on are text. White space next to a
//! tag is layout and left out, as templates strip it when the message comes back.

use super::event::Sink;

/// The tags of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tags {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space and the beginning of an opening tag yet.
    Start,
    Inside,
    /// Behind the closing tag: white space is layout.
    Closed,
    Outside,
}

/// The splitter of one answer.
#[derive(Debug)]
pub(super) struct ReasoningSplitter {
    tags: Tags,
    state: State,
    /// The prompt ended with the opening tag, so reasoning needs none.
    is_implied: bool,
    /// What may become a tag.
    held: String,
    /// White space before that: layout if it does.
    spaces: String,
    /// Reasoning has begun: white space is text unless the closing tag follows.
    has_text: bool,
}

impl ReasoningSplitter {
    pub(super) fn new(tags: Tags, is_implied: bool) -> Self {
        let (held, spaces) = (String::new(), String::new());
        Self { tags, state: State::Start, is_implied, held, spaces, has_text: false }
    }

    /// Takes more of the answer; reasoning goes to `sink`, the rest is appended to `content`.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink, content: &mut String) {
        for (at, c) in text.char_indices() {
            match self.state {
                State::Start if self.held.is_empty() && c.is_whitespace() => self.spaces.push(c),
                State::Start => self.start(c, sink, content),
                State::Inside => self.inside(c, sink),
                State::Closed if c.is_whitespace() => {}
                State::Closed | State::Outside => {
                    self.state = State::Outside;
                    content.push_str(&text[at..]);
                    return;
                }
            }
        }
    }

    /// Whether what comes next is reasoning, unless it is the closing tag.
    pub(super) fn is_inside(&self) -> bool {
        self.state == State::Inside || (self.state == State::Start && self.is_implied)
    }

    fn start(&mut self, c: char, sink: &mut Sink, content: &mut String) {
        self.held.push(c);
        if self.held == self.tags.open {
            self.held.clear();
            self.spaces.clear();
            self.state = State::Inside;
        } else if !self.tags.open.starts_with(&self.held) {
            let held = std::mem::take(&mut self.held);
            if self.is_implied {
                self.state = State::Inside;
                held.chars().for_each(|c| self.inside(c, sink));
            } else {
                self.state = State::Outside;
                content.push_str(&std::mem::take(&mut self.spaces));
                content.push_str(&held);
            }
        }
    }

    fn inside(&mut self, c: char, sink: &mut Sink) {
        self.held.push(c);
        while !self.tags.close.starts_with(&self.held) {
            let first = self.held.remove(0);
            self.tell(first, sink);
        }
        if self.held == self.tags.close {
            self.held.clear();
            self.state = State::Closed;
        }
    }

    fn tell(&mut self, c: char, sink: &mut Sink) {
        if c.is_whitespace() {
            self.spaces.push(c);
            return;
        }
        let spaces = std::mem::take(&mut self.spaces);
        if std::mem::replace(&mut self.has_text, true) {
            sink.reasoning(&spaces);
        }
        sink.reasoning(c.encode_utf8(&mut [0; 4]));
    }

    /// The answer is over. What was held back is text: reasoning that never closed stays reasoning, an
    /// opening tag that never became one is content.
    pub(super) fn finish(&mut self, sink: &mut Sink, content: &mut String) {
        let held = std::mem::take(&mut self.spaces) + &std::mem::take(&mut self.held);
        match self.state {
            State::Start if !self.is_implied => content.push_str(&held),
            State::Start | State::Inside if self.has_text => sink.reasoning(&held),
            State::Start | State::Inside => sink.reasoning(held.trim_start()),
            State::Closed | State::Outside => {}
        }
        self.state = State::Outside;
    }
}
