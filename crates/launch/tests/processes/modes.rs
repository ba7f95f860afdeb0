//! What children and launchers of the tests do.

use crate::harness::spec;
use lockstep_comm::watch::{Activity, WatchPage};
use lockstep_launch::{ChildEntry, Event, Limits, Stage, StderrSink, Supervisor, Watchdog, WatchedLoop};
use std::io::{BufRead, Read, Seek, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Runs one child; `entry.config_json` says what it does, e.g. `exit 3 the last words`.
pub fn child(entry: ChildEntry) -> ! {
    let config = entry.config_json.clone();
    let (mode, rest) = config.split_once(' ').unwrap_or((&config, ""));
    match mode {
        "sleep" => up(),
        "busy" => {
            eprintln!("up");
            loop {
                std::hint::spin_loop();
            }
        }
        "deaf" => {
            // SAFETY: SIG_IGN is a valid disposition.
            unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
            up()
        }
        // Only the pipe to the launcher is left to end this one.
        "no-death-signal" => {
            rustix::process::set_parent_process_death_signal(None).unwrap();
            eprintln!("up");
            loop {
                std::hint::spin_loop();
            }
        }
        "exit" => {
            let (code, words) = rest.split_once(' ').unwrap_or((rest, ""));
            if !words.is_empty() {
                eprintln!("{words}");
            }
            std::process::exit(code.parse().unwrap())
        }
        "exit-when-told" => {
            eprintln!("up");
            let [mut told] =
                <[_; 1]>::try_from(entry.inherited).map(|[fd]| [std::fs::File::from(fd)]).unwrap();
            told.read_exact(&mut [0]).unwrap();
            std::process::exit(rest.parse().unwrap())
        }
        "panic" => panic!("{rest}"),
        "flood" => loop {
            println!("{}", "flood ".repeat(100));
        },
        "long-line" => {
            eprintln!("{}", "x".repeat(100_000));
            println!("from stdout");
            eprint!("no newline");
            std::process::exit(0)
        }
        "echo-length" => {
            eprintln!("length {}", config.len());
            up()
        }
        "read-inherited" => {
            for fd in entry.inherited {
                let mut file = std::fs::File::from(fd);
                let mut text = String::new();
                file.rewind().unwrap();
                file.read_to_string(&mut text).unwrap();
                eprintln!("inherited {text}");
            }
            up()
        }
        "describe" => {
            describe(&entry);
            up()
        }
        other => panic!("no child mode {other}"),
    }
}

fn up() -> ! {
    eprintln!("up");
    loop {
        std::thread::park();
    }
}

/// Prints what the launcher promises about a child's surroundings.
fn describe(entry: &ChildEntry) {
    let argv0 = std::env::args().next().unwrap();
    let comm = std::fs::read_to_string("/proc/self/comm").unwrap();
    let own_group = rustix::process::getpgrp() == rustix::process::getpid();
    let ignores = |signal: i32| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap().trim();
        u64::from_str_radix(mask, 16).unwrap() >> (signal - 1) & 1 == 1
    };
    let mut fds: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|e| e.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    // Without the one that was listing.
    fds.retain(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).is_ok());
    fds.sort();
    eprintln!(
        "argv0={argv0} name={} comm={} own_group={own_group} int={} hup={} term={} fds={fds:?}",
        entry.name,
        comm.trim(),
        ignores(libc::SIGINT),
        ignores(libc::SIGHUP),
        ignores(libc::SIGTERM),
    );
}

/// Runs one launcher; `mode` is a list of child modes, optionally after `wait `, which delays the
/// start until a line arrives on stdin. Prints its children once they are up, then every event.
pub fn launcher(mode: &str) -> ! {
    if mode == "stuck" {
        stuck_launcher();
    }
    let (wait, children) = match mode.strip_prefix("wait ") {
        Some(rest) => (true, rest),
        None => (false, mode),
    };
    let (lines_in, lines) = channel();
    let sink = StderrSink::to(ToBoth { lines: lines_in }, None).unwrap();
    let (supervisor, mut events) = Supervisor::start(sink).unwrap();
    if wait {
        println!("waiting");
        std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    }
    let mut pids = Vec::new();
    for (rank, child) in children.split(',').enumerate() {
        pids.push(supervisor.spawn(spec(rank, child)).unwrap().to_string());
        while !lines.recv().unwrap().contains("up") {}
    }
    supervisor.at_sudden_end(|| println!("cleaned")).unwrap();
    println!("children {}", pids.join(" "));
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Signal(signal) => println!("signal {signal}"),
            Event::Failed(failure) => {
                drop(supervisor);
                eprintln!("{failure}");
                std::process::exit(failure.exit_code.code());
            }
            _ => {}
        }
    }
    unreachable!("the supervisor outlives its events");
}

/// A launcher whose own loop, the api's, stops beating: the watchdog, in a thread of its own, has to end it.
fn stuck_launcher() -> ! {
    let sink = StderrSink::to(std::io::stderr(), None).unwrap();
    let (_, page) = WatchPage::create(1).unwrap();
    let watched = WatchedLoop {
        process: "lockstep".into(),
        pid: std::process::id(),
        label: "api".into(),
        mark: 0,
        rank: None,
        replica: None,
    };
    page.mark(0).enter(Activity::Messages, 0);
    let limits = Limits::of(Duration::from_secs(1));
    let _running = Watchdog::start(page, vec![watched], (Stage::Serving, limits), sink).unwrap();
    println!("stuck");
    loop {
        std::thread::park();
    }
}

/// Shows lines and lets the launcher wait for them.
struct ToBoth {
    lines: std::sync::mpsc::Sender<String>,
}

impl Write for ToBoth {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.lines.send(String::from_utf8_lossy(bytes).into_owned());
        std::io::stderr().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
