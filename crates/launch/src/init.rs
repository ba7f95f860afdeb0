//! Signals while this program is process 1, the init of a container.
//!
//! The kernel drops a signal that process 1 neither handles nor ignores: a program that leaves SIGTERM and Ctrl-C at
//! their default, as every command but `serve` does for most of its life, could then only be killed. [`end_on_signals`]
//! restores what everybody expects; whoever handles a signal itself calls [`hand_over`] first, because handlers are
//! chained.

use crate::signals::SIGNALS;

/// First thing in `main`. As process 1: the signals that end other processes end this one, at once and with code 128
/// plus the signal, unless they were ignored at start. Otherwise nothing.
pub fn end_on_signals() {
    if std::process::id() != 1 {
        return;
    }
    for signal in SIGNALS {
        if disposition(signal) == libc::SIG_DFL {
            set(signal, end as *const () as libc::sighandler_t);
        }
    }
}

/// Gives `signal` its default back if [`end_on_signals`] took it, for a handler that is registered next.
pub fn hand_over(signal: i32) {
    if disposition(signal) == end as *const () as libc::sighandler_t {
        set(signal, libc::SIG_DFL);
    }
}

extern "C" fn end(signal: i32) {
    crate::child::exit_at_once(128 + signal);
}

/// What happens on `signal` now.
pub(crate) fn disposition(signal: i32) -> libc::sighandler_t {
    // SAFETY: a zeroed sigaction is a valid value to be overwritten.
    let mut current: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null new action only reads; `current` is writable and outlives the call. It cannot fail for the
    // signals of this crate.
    unsafe { libc::sigaction(signal, std::ptr::null(), &mut current) };
    current.sa_sigaction
}

fn set(signal: i32, action: libc::sighandler_t) {
    // SAFETY: `action` is SIG_DFL or `end`, which makes one async-signal-safe call.
    unsafe { libc::signal(signal, action) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_is_handed_over_and_nothing_else() {
        // No other test of this process touches SIGWINCH.
        let signal = libc::SIGWINCH;
        set(signal, end as *const () as libc::sighandler_t);
        hand_over(signal);
        assert_eq!(disposition(signal), libc::SIG_DFL);
        set(signal, libc::SIG_IGN);
        hand_over(signal);
        assert_eq!(disposition(signal), libc::SIG_IGN);
        set(signal, libc::SIG_DFL);
    }
}
