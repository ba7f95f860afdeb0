//! What the kernel says of a process: whether it runs, where it waits, what it has used.
//!
//! Everything here is for words and for telling a stuck process from one that computes; what cannot be read
//! (another user's kernel stack, a process that has gone) is left out.

use std::time::Duration;

/// Clock ticks of `/proc/PID/stat` in a second: part of Linux's interface since 2.6.
const TICKS_PER_S: u64 = 100;
/// Frames of a kernel stack that are told.
const FRAMES_MAX: usize = 6;

/// CPU time that the threads of a process have used.
pub(crate) fn cpu_time(pid: u32) -> Option<Duration> {
    parse_cpu_time(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a signal has stopped a process.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| fields(&stat).next() == Some("T"))
}

/// State, place and, where it may be read, the stack in the kernel of a process's main thread.
pub(crate) fn describe(pid: u32) -> String {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let Some(stat) = read("stat") else { return "it has gone".into() };
    let mut text = state_name(&stat).to_owned();
    if let Some(place) = read("wchan").filter(|place| !matches!(place.trim(), "" | "0")) {
        text.push_str(&format!(", in {}", place.trim()));
    }
    let stack = read("stack").unwrap_or_default();
    let frames = frames(&stack);
    if !frames.is_empty() {
        text.push_str(&format!(" (kernel stack: {})", frames.join(" < ")));
    }
    text
}

/// The fields of a `stat` line from the state on: the name before it may hold anything but its last `)`.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace()
}

fn parse_cpu_time(stat: &str) -> Option<Duration> {
    let mut times = fields(stat).skip(11);
    let (user, system): (u64, u64) = (times.next()?.parse().ok()?, times.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 1000 / TICKS_PER_S))
}

fn state_name(stat: &str) -> &'static str {
    match fields(stat).next() {
        Some("R") => "running",
        Some("S") => "sleeping",
        Some("D") => "in an uninterruptible sleep",
        Some("T") => "stopped by a signal",
        Some("t") => "stopped by a debugger",
        Some("Z" | "X") => "dead",
        _ => "in an unknown state",
    }
}

/// Function names, innermost first.
fn frames(stack: &str) -> Vec<&str> {
    let name = |line: &'_ str| -> Option<usize> { line.find("] ").map(|at| at + 2) };
    let lines = stack.lines().filter_map(|line| Some(&line[name(line)?..]));
    lines.map(|text| text.split('+').next().unwrap_or(text)).take(FRAMES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_shifts_nothing() {
        let stat = "7 (a) S (b) T 1 7 7 0 -1 4194560 1 0 0 0 123 45 0 0 20 0 5 0 99 1 2";
        assert_eq!(parse_cpu_time(stat), Some(Duration::from_millis(1680)));
        assert_eq!(state_name(stat), "stopped by a signal");
        assert_eq!((parse_cpu_time("7 (x"), state_name("")), (None, "in an unknown state"));
    }

    #[test]
    fn a_stack_is_told_by_its_names() {
        let stack = "[<0>] futex_wait_queue+0x60/0x90\n[<0>] do_futex+0x1/0x2\nnonsense\n";
        assert_eq!(frames(stack), ["futex_wait_queue", "do_futex"]);
    }

    #[test]
    fn this_process_can_be_described() {
        let pid = std::process::id();
        assert!(cpu_time(pid).is_some());
        assert!(!describe(pid).is_empty());
        assert_eq!(describe(u32::MAX), "it has gone");
    }
}
