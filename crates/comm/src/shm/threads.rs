//! A rank group whose ranks are threads of one process, for measurements and self-tests.

use super::abort::AbortHandle;
use super::collective::ShmCollective;
use super::group::ShmGroup;
use super::layout::ShmLayout;
use super::region::SharedRegion;
use super::wait::ShmOptions;
use crate::collective::{CollectiveError, Result};
use std::fmt::Display;
use std::sync::Arc;

/// Runs `rank` for each of `ranks` ranks, all at once, and gives what came of them, by rank; the outer error is a
/// panic's. A rank that errors or panics ends the group, so that no other waits for it.
///
/// Errors when there can be no such group.
pub fn as_threads<T, E>(
    ranks: usize,
    options: ShmOptions,
    rank: impl Fn(ShmGroup, ShmCollective) -> std::result::Result<T, E> + Sync,
) -> Result<Vec<std::thread::Result<std::result::Result<T, E>>>>
where
    T: Send,
    E: From<CollectiveError> + Display + Send,
{
    let layout = ShmLayout::new(ranks, ShmLayout::SLOT_BYTES_DEFAULT)?;
    let region = Arc::new(SharedRegion::map(SharedRegion::create(layout)?)?);
    let joined = |number: usize| -> std::result::Result<T, E> {
        let group = ShmGroup::new(Arc::clone(&region), number, options)?;
        let collective = ShmCollective::new(Arc::clone(&region), number, options)?;
        rank(group, collective)
    };
    let run = |number: usize| {
        let guard = AbortOnPanic { abort: AbortHandle::of(Arc::clone(&region)), rank: number };
        let done = joined(number);
        if let Err(error) = &done {
            guard.abort.abort(&format!("rank {number}: {error}"));
        }
        done
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|number| scope.spawn(move || run(number))).collect();
        Ok(threads.into_iter().map(|thread| thread.join()).collect())
    })
}

/// Lets the other ranks go when this one's thread unwinds.
#[derive(Debug)]
pub struct AbortOnPanic {
    /// Of the group.
    pub abort: AbortHandle,
    /// Whose thread this is.
    pub rank: usize,
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort.abort(&format!("rank {} panicked", self.rank));
        }
    }
}
