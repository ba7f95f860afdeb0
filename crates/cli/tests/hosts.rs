//! Several hosts, on the real binary. Hosts are network namespaces that the test makes for itself: it runs again inside
//! one of its own, where it may do as it likes with links, and everything is gone with its last process. Skipped, with
//! the reason, where that is not permitted or the binary was built without Gloo.

// A failed unwrap is a failed test, in helper functions too.
#![allow(clippy::unwrap_used)]

mod common;

use common::{BINARY, REFUSAL_LIMIT, command};
use lockstep_testkit::fixtures::random_models;
use lockstep_testkit::process::Signal;
use lockstep_testkit::server::{EXIT_LIMIT, Exit};
use lockstep_testkit::{Fixture, ServeCommand, Server, TempDir};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Set in the run inside the namespace.
const INSIDE: &str = "LOCKSTEP_TEST_INSIDE";
const SECRET: &str = "LOCKSTEP_DIST_SECRET";
/// `--collective-timeout` where something is to go wrong.
const TIMEOUT: Duration = Duration::from_secs(3);
/// What a busy machine may take longer to say who is lost, and to end.
const BUSY: Duration = Duration::from_secs(10);

fn has_gloo() -> bool {
    let built = lockstep_comm::gloo::IS_BUILT;
    if !built {
        eprintln!("skipped: built without the feature gloo");
    }
    built
}

/// Runs `body` in a network namespace of its own: this test again, inside. `name` is the test's.
fn in_own_network(name: &str, body: impl FnOnce()) {
    if !has_gloo() {
        return;
    }
    if std::env::var(INSIDE).is_ok() {
        run("ip", &["link", "set", "lo", "up"]);
        return body();
    }
    let probe = "ip link add name probe type veth && nsenter --version";
    match unshare().args(["sh", "-c", probe]).output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return eprintln!("skipped: no network namespaces here: {why}");
        }
        Err(error) => return eprintln!("skipped: no network namespaces here: unshare: {error}"),
    }
    let exe = std::env::current_exe().unwrap();
    let arguments = [name, "--exact", "--nocapture", "--test-threads=1"];
    let status = unshare().arg(exe).args(arguments).env(INSIDE, "1").status().unwrap();
    assert!(status.success(), "{name} inside its own network: {status}");
}

/// Runs what follows in a new network namespace, with rights over it.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::getuid().is_root() {
        command.arg("--map-root-user");
    }
    command.arg("--net").stdin(Stdio::null());
    command
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {}: {status}", arguments.join(" "));
}

/// Another host: a network namespace, joined to this one by a link.
struct Host {
    number: usize,
    /// Keeps the namespace.
    holder: Child,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

impl Host {
    /// The hosts with numbers 1..=count, at 10.77.0.(number + 1); this one is 10.77.0.1.
    fn all(count: usize) -> Vec<Self> {
        run("ip", &["link", "add", "name", "hosts", "type", "bridge"]);
        run("ip", &["addr", "add", "10.77.0.1/24", "dev", "hosts"]);
        run("ip", &["link", "set", "hosts", "up"]);
        (1..=count).map(Self::new).collect()
    }

    fn new(number: usize) -> Self {
        // `cat` reads for ever and ends with its input, that is, with this process.
        let holder = unshare().arg("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let host = Self { number, holder };
        let (link, pid) = (host.link(), host.holder.id().to_string());
        // The namespace is another one once `unshare` has run.
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        let there = || std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let start = Instant::now();
        while there().is_none_or(|there| there == own) {
            assert!(start.elapsed() < BUSY, "no namespace");
            std::thread::yield_now();
        }
        run("ip", &["link", "add", "name", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid]);
        run("ip", &["link", "set", &link, "master", "hosts", "up"]);
        host.run(&["ip", "addr", "add", &format!("10.77.0.{}/24", number + 1), "dev", "eth0"]);
        host.run(&["ip", "link", "set", "eth0", "up"]);
        host.run(&["ip", "link", "set", "lo", "up"]);
        host
    }

    fn link(&self) -> String {
        format!("host{}", self.number)
    }

    fn namespace(&self) -> String {
        format!("--net=/proc/{}/ns/net", self.holder.id())
    }

    fn run(&self, command: &[&str]) {
        run("nsenter", &[&[self.namespace().as_str(), "--"], command].concat());
    }

    /// Nothing passes any more, and nobody is told.
    fn cut(&self) {
        run("ip", &["link", "set", &self.link(), "down"]);
    }

    /// The same command on this host.
    fn command(&self, of_head: &ServeCommand) -> ServeCommand {
        let namespace = self.namespace();
        of_head.clone().flag("--node-rank", self.number).under(&["nsenter", &namespace, "--"])
    }
}

/// `serve` on host 0 of `nnodes`.
fn head(model: &Path, tp: usize, nnodes: usize) -> ServeCommand {
    command(model, tp)
        .flag("--nnodes", nnodes)
        .flag("--node-rank", 0)
        .flag("--dist-init-addr", "10.77.0.1:7000")
        .flag("--dist-timeout", 60)
        .env(SECRET, Path::new("a secret for these tests only"))
}

/// Starts host 0 and the others, and waits until they answer.
fn start(head: &ServeCommand, hosts: &[Host]) -> (Server, Vec<Server>) {
    let others: Vec<Server> = hosts.iter().map(|host| host.command(head).spawn()).collect();
    (head.start(), others)
}

/// An answer with the log-probabilities of every token: equal bits print equally.
fn answer(server: &Server, fixture: &Fixture) -> Value {
    let extra = json!({"max_tokens": fixture.expect.greedy_ids.len().max(8), "logprobs": 3});
    let body = server.completion_body(&fixture.expect.prompt, extra);
    server.post("/v1/completions", &body).json()["choices"].clone()
}

fn fixture() -> (Fixture, TempDir, PathBuf) {
    let (fixture, temp) = (Fixture::named("rand_llama"), TempDir::new("hosts"));
    let model = fixture.write_into(temp.path());
    (fixture, temp, model)
}

/// What a launcher printed last.
fn last_line(exit: &Exit) -> &str {
    exit.output.lines().last().unwrap_or_default()
}

#[test]
fn two_hosts_answer_as_one_and_drain_together() {
    in_own_network("two_hosts_answer_as_one_and_drain_together", || {
        let (fixture, _temp, model) = fixture();
        let alone = command(&model, 1).start();
        let want = answer(&alone, &fixture);
        alone.stop();
        let together = command(&model, 2).start();
        assert_eq!(answer(&together, &fixture), want, "tp 2 on one host");
        together.stop();

        let hosts = Host::all(1);
        let (server, mut others) = start(&head(&model, 2, 2), &hosts);
        assert_eq!(answer(&server, &fixture), want, "tp 2 on two hosts");
        assert_eq!(others[0].processes().len(), 2, "a launcher and a rank: {:?}", others[0].processes());
        let info = server.info();
        assert_eq!(info["engine"]["ranks"][1]["label"], "TP1");
        // A host that is told to stop has the whole server drained.
        let long = server.completion_body("C", json!({"max_tokens": 30}));
        let mut stream = server.open_stream("/v1/completions", &long);
        assert!(stream.next_event().unwrap().is_some());
        others[0].signal(Signal::Term);
        let mut events = 0;
        while stream.next_event().unwrap().is_some() {
            events += 1;
        }
        assert!(events >= 29, "the stream is finished first, {events} events came");
        let mut server = server;
        let (exit, there) = (server.wait_exit(EXIT_LIMIT), others[0].wait_exit(EXIT_LIMIT));
        assert_eq!((exit.code, there.code), (Some(0), Some(0)), "{}\n{}", exit.output, there.output);
        others[0].wait_gone(BUSY);
    });
}

/// A stage on each host, and where the stages have two ranks each, those in shared memory.
#[test]
fn stages_on_hosts_of_their_own_answer_as_one() {
    in_own_network("stages_on_hosts_of_their_own_answer_as_one", || {
        let (fixture, _temp, model) = fixture();
        let alone = command(&model, 1).start();
        let want = answer(&alone, &fixture);
        alone.stop();
        let hosts = Host::all(1);
        for tp in [1, 2] {
            let (mut server, mut others) = start(&head(&model, tp, 2).flag("--pp", 2), &hosts);
            assert_eq!(answer(&server, &fixture), want, "tp {tp} x pp 2 on two hosts");
            assert_eq!(others[0].processes().len(), 1 + tp, "{:?}", others[0].processes());
            server.signal(Signal::Term);
            let (exit, there) = (server.wait_exit(EXIT_LIMIT), others[0].wait_exit(EXIT_LIMIT));
            assert_eq!((exit.code, there.code), (Some(0), Some(0)), "{}\n{}", exit.output, there.output);
        }
    });
}

#[test]
fn three_hosts_answer_as_one_and_a_killed_one_ends_all() {
    in_own_network("three_hosts_answer_as_one_and_a_killed_one_ends_all", || {
        let (fixture, temp) = (random_models::slow(3, 64), TempDir::new("hosts"));
        let model = fixture.write_into(temp.path());
        let alone = command(&model, 1).start();
        let want = answer(&alone, &fixture);
        alone.stop();
        let hosts = Host::all(2);
        let (mut server, mut others) = start(&head(&model, 1, 3).flag("--pp", 3), &hosts);
        assert_eq!(answer(&server, &fixture), want, "pp 3 on three hosts");
        others[1].signal(Signal::Kill);
        let (exit, there) = (server.wait_exit(EXIT_LIMIT), others[0].wait_exit(EXIT_LIMIT));
        assert_eq!((exit.code, there.code), (Some(4), Some(4)), "{}\n{}", exit.output, there.output);
        let words = "host 2 (10.77.0.3) was lost while serving: its launcher has ended";
        assert!(last_line(&exit).contains(words), "{}", last_line(&exit));
        assert!(last_line(&there).contains("host 0 has ended the server"), "{}", last_line(&there));
    });
}

#[test]
fn a_cut_link_is_named_on_both_sides() {
    in_own_network("a_cut_link_is_named_on_both_sides", || {
        let (_fixture, _temp, model) = fixture();
        let hosts = Host::all(1);
        let head = head(&model, 2, 2).flag("--collective-timeout", TIMEOUT.as_secs());
        let (mut server, mut others) = start(&head, &hosts);
        let long = server.completion_body("C", json!({"max_tokens": 200, "ignore_eos": true}));
        let mut stream = server.open_stream("/v1/completions", &long);
        assert!(stream.next_event().unwrap().is_some());
        let cut = Instant::now();
        hosts[0].cut();
        let exit = server.wait_exit(TIMEOUT + BUSY);
        let there = others[0].wait_exit(TIMEOUT + BUSY);
        assert!(cut.elapsed() < TIMEOUT + BUSY);
        assert_eq!((exit.code, there.code), (Some(4), Some(4)), "{}\n{}", exit.output, there.output);
        let said = last_line(&exit);
        assert!(said.contains("rank 1") || said.contains("host 1 (10.77.0.2) was lost"), "{said}");
        assert!(last_line(&there).contains("host 0 (10.77.0.1:7000) was lost"), "{}", last_line(&there));
        server.wait_gone(BUSY);
        others[0].wait_gone(BUSY);
    });
}

#[test]
fn killed_ranks_and_hosts_are_named_and_the_group_starts_again() {
    in_own_network("killed_ranks_and_hosts_are_named_and_the_group_starts_again", || {
        let (fixture, _temp, model) = fixture();
        let hosts = Host::all(1);
        let head = head(&model, 2, 2).flag("--restart", "on-failure");
        let (mut server, mut others) = start(&head, &hosts);
        let want = answer(&server, &fixture);

        // A rank on host 1: both hosts' ranks start again.
        let victim = others[0].process("lockstep-TP1-scheduler");
        lockstep_testkit::process::signal(victim.pid, Signal::Kill);
        wait_for(&server, "lockstep-TP1-scheduler on host 1 was killed by signal 9");
        wait_for(&server, "the engine was restarted and answers");
        assert_eq!(answer(&server, &fixture), want, "after a rank was killed");

        // The launcher of host 1, and its ranks with it: it has to join again.
        others[0].signal(Signal::Kill);
        wait_for(&server, "host 1 (10.77.0.2) was lost while serving: its launcher has ended");
        others[0].wait_gone(BUSY);
        wait_for(&server, "host 1 has to join again");
        others = vec![hosts[0].command(&head).spawn()];
        server.wait_ready();
        assert_eq!(answer(&server, &fixture), want, "after a host was lost");

        // Host 0's launcher: host 1 ends its own.
        server.signal(Signal::Kill);
        let there = others[0].wait_exit(EXIT_LIMIT);
        assert_eq!(there.code, Some(4), "{}", there.output);
        assert!(last_line(&there).contains("host 0 (10.77.0.1:7000) was lost"), "{}", last_line(&there));
        others[0].wait_gone(BUSY);
        server.wait_gone(BUSY);
    });
}

/// Waits until the launcher has said that.
fn wait_for(server: &Server, words: &str) {
    let said = lockstep_testkit::process::poll(Duration::from_secs(60), || {
        server.output().contains(words).then_some(())
    });
    assert!(said.is_some(), "never said {words:?}:\n{}", server.output());
}

/// No namespaces here: whoever is refused gets no further.
#[test]
fn who_does_not_belong_is_refused_in_one_sentence() {
    if !has_gloo() {
        return;
    }
    let (_fixture, temp, model) = fixture();
    let port = lockstep_testkit::server::free_port();
    let target = format!("127.0.0.1:{port}");
    let serve = |node: usize, model: &Path| {
        let command = ServeCommand::new(BINARY, model).tp(2).flag("--num-pages", 64).flag("--nnodes", 2);
        let command = command.flag("--node-rank", node).flag("--dist-init-addr", &target);
        command.flag("--dist-timeout", 20).env(SECRET, Path::new("a secret for these tests only"))
    };
    let mut head = serve(0, &model).spawn();
    let refused = |command: ServeCommand, parts: &[&str]| {
        let exit = command.run_to_exit(REFUSAL_LIMIT);
        assert_eq!(exit.code, Some(2), "{}", exit.output);
        let said = last_line(&exit);
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    refused(
        serve(1, &model).env(SECRET, Path::new("not the secret of these tests")),
        &["host 0 at", "another secret", "--dist-secret-file"],
    );
    refused(serve(1, &model).flag("--page-size", 32), &["host 1 has --page-size 32, host 0 has 16"]);
    let other = Fixture::named("chain").write_into(temp.path());
    refused(serve(1, &other), &["host 1 has model files", "the same on every host"]);
    refused(serve(1, &model).flag("--tp", 4).flag("--nnodes", 4), &["--nnodes 4, host 0 has 2"]);
    let exit = head.wait_exit(Duration::from_secs(40));
    assert_eq!(exit.code, Some(4), "{}", exit.output);
    let said = last_line(&exit);
    assert!(said.contains("1 of 2 hosts have joined") && said.contains("host 1 is missing"), "{said}");
    assert!(said.contains("last refused: host 1 has --nnodes 4"), "{said}");
    let alone = serve(1, &model).flag("--dist-timeout", 1).run_to_exit(REFUSAL_LIMIT);
    assert_eq!(alone.code, Some(2), "{}", alone.output);
    assert!(last_line(&alone).contains("host 0 cannot be reached"), "{}", last_line(&alone));
    let secretless = command(&model, 2).flag("--nnodes", 2).flag("--dist-init-addr", &target);
    let exit = secretless.run_to_exit(REFUSAL_LIMIT);
    assert!(exit.code == Some(2) && last_line(&exit).contains(SECRET), "{}", exit.output);
}

/// A folder with a library that has NCCL's functions as far as a launcher needs them, which is the version; `None` without a
/// C compiler.
fn nccl_of_version(version: u32, temp: &TempDir) -> Option<PathBuf> {
    let folder = temp.path().join(format!("nccl-{version}"));
    std::fs::create_dir(&folder).unwrap();
    let never = ["GetUniqueId", "CommInitRank", "AllReduce", "AllGather", "Send", "Recv"];
    let functions = never.map(|name| format!("int nccl{name}(void) {{ return 3; }}\n")).concat();
    let code = format!("{functions}int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}\n");
    let source = folder.join("nccl.c");
    std::fs::write(&source, code).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(folder.join("libnccl.so.2")).arg(source);
    match compiler.status() {
        Ok(status) => {
            assert!(status.success(), "cc: {status}");
            Some(folder)
        }
        Err(error) => {
            eprintln!("skipped: cc: {error}");
            None
        }
    }
}

/// No GPUs here: launchers refuse each other before a rank is started.
#[test]
fn hosts_whose_gpus_cannot_talk_are_named_before_ranks_start() {
    if !has_gloo() {
        return;
    }
    let (_fixture, temp, model) = fixture();
    let (Some(ours), Some(older)) = (nccl_of_version(22_805, &temp), nccl_of_version(22_703, &temp)) else {
        return;
    };
    let target = format!("127.0.0.1:{}", lockstep_testkit::server::free_port());
    let serve = |node: usize, device: &str, nccl: &Path| {
        let command = ServeCommand::new(BINARY, &model).tp(2).flag("--nnodes", 2).flag("--node-rank", node);
        let command = command.flag("--dist-init-addr", &target).flag("--device", device);
        let command = command.env(lockstep_comm::library::FOLDERS_VARIABLE, nccl);
        command.env(SECRET, Path::new("a secret for these tests only"))
    };
    let mut head = serve(0, "cuda", &ours).spawn();
    let refused = |command: ServeCommand, words: &str| {
        let exit = command.run_to_exit(REFUSAL_LIMIT);
        assert!(exit.code == Some(2) && last_line(&exit).contains(words), "{}", exit.output);
    };
    refused(serve(1, "cuda", &older), "host 1 has NCCL 2.27.3, host 0 has 2.28.5");
    refused(serve(1, "cpu", &ours), "host 1 has --device cpu, host 0 has cuda");
    refused(serve(1, "cuda", &ours).switch("--share-gpu"), "--share-gpu is for TP groups of one host");
    refused(serve(1, "cuda", &ours).flag("--gpu-ids", "0,1"), "2 GPUs for 1 ranks of this host");
    if lockstep_comm::nccl::library_version().is_err() {
        let nothing = temp.path().join("nothing");
        refused(serve(1, "cuda", &nothing), "host 1 has NCCL none (cannot open libnccl.so.2");
        refused(serve(0, "cuda", &nothing), "host 0 cannot reach the GPUs of other hosts: cannot open");
    }
    head.signal(Signal::Term);
    assert_eq!(head.wait_exit(EXIT_LIMIT).code, Some(143));
}

#[test]
fn without_gloo_several_hosts_are_refused_with_the_way_to_get_it() {
    if lockstep_comm::gloo::IS_BUILT {
        return;
    }
    let (_fixture, _temp, model) = fixture();
    let exit = command(&model, 2).flag("--nnodes", 2).run_to_exit(REFUSAL_LIMIT);
    assert_eq!(exit.code, Some(2), "{}", exit.output);
    assert!(last_line(&exit).contains("cargo build --release --features gloo"), "{}", last_line(&exit));
}
