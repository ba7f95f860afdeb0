//! What a child process does: read its configuration, play its part, exit with a meaningful code.

pub mod rank;
pub mod text;

use crate::logging::{self, LogSettings, Speaker};
use lockstep_comm::watch::WatchPage;
use lockstep_core::ExitCode;
use lockstep_engine::RankConfig;
use lockstep_launch::ChildEntry;
use serde::{Deserialize, Serialize};

/// What the launcher tells a child.
#[derive(Debug, Serialize, Deserialize)]
pub struct ChildConfig {
    /// How log lines show it.
    pub speaker: Speaker,
    /// What it logs.
    pub log: LogSettings,
    /// The first mark on the watch page that is this process's.
    pub mark: usize,
    /// What to do.
    pub part: Part,
}

/// The part a child plays.
#[derive(Debug, Serialize, Deserialize)]
pub enum Part {
    /// A scheduler process: one rank.
    Rank(Box<RankConfig>),
    /// A tokenizer, the detokenizer, or both in one process.
    Text(Box<text::TextConfig>),
}

/// Runs the child to its end; returns its exit code.
pub fn run(entry: ChildEntry) -> i32 {
    let config: ChildConfig = match serde_json::from_str(&entry.config_json) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("{}: the launcher's configuration cannot be read: {error}", entry.name);
            return ExitCode::Internal.code();
        }
    };
    logging::init(config.speaker, config.log, std::io::stderr);
    let mut inherited = entry.inherited.into_iter();
    let page = match inherited.next().map(WatchPage::map) {
        Some(Ok(page)) => page,
        Some(Err(error)) => {
            tracing::error!("{error}");
            return ExitCode::Internal.code();
        }
        None => {
            tracing::error!("the launcher gave no watch page; this is a bug in lockstep");
            return ExitCode::Internal.code();
        }
    };
    match config.part {
        Part::Rank(mut rank) => {
            let region = inherited.next();
            if let Some(listener) = inherited.next() {
                rank.links.set_listener(listener);
            }
            rank::run(&rank, region, page.mark(config.mark))
        }
        Part::Text(text) => text::run(&text, &page, config.mark),
    }
}
