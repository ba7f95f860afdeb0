//! Links between threads with contexts of their own: to libzmq that is the same as two processes.

use super::curve::CurveSecret;
use super::socket::{Kind, Socket};
use super::{
    AsyncReceiver, BroadcastReceiver, BroadcastSender, Context, Endpoint, LinkError, Receiver, Sender,
    random_prefix,
};
use crate::secret::Key;
use lockstep_core::RequestId;
use lockstep_core::limits::WIRE_MESSAGE_BYTES_MAX;
use lockstep_wire::{Broadcast, ToScheduler, WireError, encode};
use std::io::Read;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

/// Long enough that only a hang reaches it.
const LONG: Duration = Duration::from_secs(60);

fn endpoint(name: &str) -> Endpoint {
    Endpoint::private(&random_prefix(), name)
}

#[test]
fn prefixes_are_128_random_bits() {
    let (a, b) = (random_prefix(), random_prefix());
    assert_eq!((a.len(), b.len()), (32, 32));
    assert!(a.bytes().all(|c| c.is_ascii_hexdigit()));
    assert_ne!(a, b);
    assert_eq!(Endpoint::private("ab", "tokenizer-0").0, "ipc://@lockstep-ab-tokenizer-0");
}

#[test]
fn ten_thousand_messages_from_two_senders_keep_each_senders_order() {
    let to = endpoint("order");
    let receiver = Receiver::<(u8, u64)>::bind(&Context::new(), &to).unwrap();
    let senders: Vec<_> = (0..2u8)
        .map(|who| {
            let to = to.clone();
            std::thread::spawn(move || {
                let sender = Sender::connect(&Context::new(), &to, 100).unwrap();
                for number in 0..5_000 {
                    sender.send(&(who, number), LONG).unwrap();
                }
                // The context waits for delivery: nothing is lost although the sender ends here.
            })
        })
        .collect();
    let mut next = [0u64; 2];
    for _ in 0..10_000 {
        let (who, number) = receiver.recv(Some(LONG)).unwrap().expect("a message is on its way");
        assert_eq!(number, next[who as usize]);
        next[who as usize] += 1;
    }
    senders.into_iter().for_each(|s| s.join().unwrap());
    assert!(receiver.try_recv().unwrap().is_none());
}

#[test]
fn a_full_queue_is_visible_and_names_its_link() {
    let nobody = endpoint("nobody");
    let sender = Sender::<u32>::connect(&Context::new(), &nobody, 3).unwrap();
    let accepted = (0..10).take_while(|i| sender.try_send(i).unwrap()).count();
    assert_eq!(accepted, 3);
    let start = Instant::now();
    let error = sender.send(&9, Duration::from_millis(30)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert!(matches!(&error, LinkError::Full { waited_ms: 30, .. }), "{error}");
    assert!(error.to_string().contains(&nobody.0), "{error}");
}

#[test]
fn a_receive_ends_at_its_time_out() {
    let receiver = Receiver::<u32>::bind(&Context::new(), &endpoint("quiet")).unwrap();
    let start = Instant::now();
    assert!(receiver.recv(Some(Duration::from_millis(20))).unwrap().is_none());
    assert!(start.elapsed() >= Duration::from_millis(20));
}

#[test]
fn a_name_is_bound_once() {
    let to = endpoint("once");
    let context = Context::new();
    let _first = Receiver::<u32>::bind(&context, &to).unwrap();
    let error = Receiver::<u32>::bind(&context, &to).unwrap_err();
    assert!(matches!(&error, LinkError::Socket { operation: "bind", .. }), "{error}");
}

#[test]
fn the_sender_refuses_an_oversized_message() {
    let sender = Sender::<String>::connect(&Context::new(), &endpoint("big"), 1).unwrap();
    let error = sender.try_send(&"x".repeat(WIRE_MESSAGE_BYTES_MAX)).unwrap_err();
    assert!(matches!(error, LinkError::Wire { source: WireError::Size { .. }, .. }), "{error}");
}

#[test]
fn the_receiver_refuses_an_oversized_message() {
    let to = endpoint("oversized");
    let pull = Socket::new(&Context::new(), Kind::Pull, &to).unwrap();
    pull.set_message_bytes_max(1_000).unwrap();
    pull.bind().unwrap();
    let push = Socket::new(&Context::new(), Kind::Push, &to).unwrap();
    push.connect().unwrap();
    push.send(&[1; 1_000], LONG).unwrap();
    assert!(pull.wait_readable(Some(LONG)).unwrap());
    assert_eq!(pull.try_recv(<[u8]>::len).unwrap(), Some(1_000));
    // The connection is cut; what the sender has written meanwhile goes with it, so repeat.
    push.send(&[2; 1_001], LONG).unwrap();
    let start = Instant::now();
    while !pull.wait_readable(Some(Duration::from_millis(20))).unwrap() {
        assert!(start.elapsed() < LONG, "the sender reconnects after the cut");
        push.send(&[3; 8], LONG).unwrap();
    }
    assert_eq!(pull.try_recv(<[u8]>::to_vec).unwrap(), Some(vec![3; 8]), "the large message never arrived");
}

#[test]
fn bytes_that_are_no_message_are_an_error_and_the_link_goes_on() {
    let to = endpoint("bad");
    let receiver = Receiver::<ToScheduler>::bind(&Context::new(), &to).unwrap();
    let push = Socket::new(&Context::new(), Kind::Push, &to).unwrap();
    push.connect().unwrap();
    let other = lockstep_wire::codec::WIRE_VERSION + 1;
    push.send(&[other, 9, 9], LONG).unwrap();
    push.send(&[], LONG).unwrap();
    push.send(&[lockstep_wire::codec::WIRE_VERSION, 0xff, 0xff], LONG).unwrap();
    push.send(&encode(&ToScheduler::FlushCache { query: 1 }).unwrap(), LONG).unwrap();
    let next = || receiver.recv(Some(LONG));
    assert!(
        matches!(next(), Err(LinkError::Wire { source: WireError::Version { got }, .. }) if got == other)
    );
    assert!(matches!(next(), Err(LinkError::Wire { source: WireError::Size { got: 0 }, .. })));
    assert!(matches!(next(), Err(LinkError::Wire { source: WireError::Malformed(_), .. })));
    assert_eq!(next().unwrap(), Some(ToScheduler::FlushCache { query: 1 }));
}

#[test]
fn late_subscribers_lose_no_broadcast() {
    // Case B6: an unacknowledged subscription lost the first message 20 times of 20.
    for round in 0..20 {
        let to = endpoint("late");
        let mut sender = BroadcastSender::bind(&Context::new(), &to, LONG).unwrap();
        let publisher = std::thread::spawn(move || {
            sender.wait_for_subscribers(2, LONG).unwrap();
            for number in 0..200 {
                sender.send(number * 10, &ToScheduler::Abort(RequestId(number))).unwrap();
            }
        });
        let receivers: Vec<_> = (0..2)
            .map(|_| {
                let to = to.clone();
                std::thread::spawn(move || {
                    let mut receiver = BroadcastReceiver::connect(&Context::new(), &to).unwrap();
                    for number in 0..200 {
                        let got = receiver.recv(Some(LONG)).unwrap().expect("nothing is lost");
                        let message = ToScheduler::Abort(RequestId(number));
                        assert_eq!(got, Broadcast { sequence: number, stamp_ms: number * 10, message });
                    }
                })
            })
            .collect();
        publisher.join().unwrap();
        receivers.into_iter().for_each(|r| r.join().unwrap_or_else(|_| panic!("round {round}")));
    }
}

#[test]
fn a_broadcast_needs_its_subscribers() {
    let to = endpoint("missing");
    let mut sender = BroadcastSender::bind(&Context::new(), &to, LONG).unwrap();
    assert!(matches!(sender.send(0, &ToScheduler::Shutdown), Err(LinkError::Subscribers { .. })));
    let _stays = BroadcastReceiver::connect(&Context::new(), &to).unwrap();
    let leaves = BroadcastReceiver::connect(&Context::new(), &to).unwrap();
    sender.wait_for_subscribers(2, LONG).unwrap();
    let error = sender.wait_for_subscribers(3, Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, LinkError::Subscribers { subscribed: 2, expected: 3, .. }), "{error}");
    drop(leaves);
    // The departure takes its time to arrive; until then sending succeeds.
    let start = Instant::now();
    let error = loop {
        match sender.send(0, &ToScheduler::FlushCache { query: 1 }) {
            Ok(()) => assert!(start.elapsed() < LONG, "the departure is noticed"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LinkError::Subscribers { subscribed: 1, expected: 2, .. }), "{error}");
}

#[test]
fn a_receiver_closes_at_once_after_its_sender_is_gone() {
    // A lingering SUB socket waits for its subscription to reach a publisher that has exited:
    // every rank would end two seconds after rank 0.
    let to = endpoint("exit");
    let mut sender = BroadcastSender::bind(&Context::new(), &to, LONG).unwrap();
    let mut receiver = BroadcastReceiver::connect(&Context::new(), &to).unwrap();
    sender.wait_for_subscribers(1, LONG).unwrap();
    sender.send(0, &ToScheduler::Shutdown).unwrap();
    drop(sender);
    assert!(receiver.recv(Some(LONG)).unwrap().is_some(), "the last message survives its sender");
    let start = Instant::now();
    drop(receiver);
    assert!(start.elapsed() < Duration::from_millis(1_500));
}

#[test]
fn a_gap_in_the_broadcast_is_an_error() {
    let to = endpoint("gap");
    let publisher = Socket::new(&Context::new(), Kind::Xpub, &to).unwrap();
    publisher.bind().unwrap();
    let mut receiver = BroadcastReceiver::connect(&Context::new(), &to).unwrap();
    assert!(publisher.wait_readable(Some(LONG)).unwrap());
    assert_eq!(publisher.try_recv(<[u8]>::to_vec).unwrap(), Some(vec![1]));
    for sequence in [0, 2] {
        let broadcast = Broadcast { sequence, stamp_ms: 0, message: ToScheduler::FlushCache { query: 1 } };
        publisher.send(&encode(&broadcast).unwrap(), LONG).unwrap();
    }
    assert!(receiver.recv(Some(LONG)).unwrap().is_some());
    let error = receiver.recv(Some(LONG)).unwrap_err();
    assert!(matches!(error, LinkError::Gap { expected: 1, got: 2, .. }), "{error}");
}

#[test]
fn async_bursts_lose_no_wake_up() {
    let to = endpoint("async");
    let receiver = Receiver::<u64>::bind(&Context::new(), &to).unwrap();
    let (burst_done, bursts) = std::sync::mpsc::channel();
    let sender = std::thread::spawn(move || {
        let sender = Sender::connect(&Context::new(), &to, 1_000).unwrap();
        let mut number = 0;
        for burst in 0..500u64 {
            for _ in 0..burst * 7919 % 13 + 1 {
                sender.send(&number, LONG).unwrap();
                number += 1;
            }
            // The receiver has drained the socket and waits (or is about to): the moment at which
            // an edge can be missed.
            bursts.recv().unwrap();
        }
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut receiver = AsyncReceiver::new(receiver).unwrap();
        let mut number = 0;
        for burst in 0..500u64 {
            for _ in 0..burst * 7919 % 13 + 1 {
                let got = tokio::time::timeout(LONG, receiver.recv()).await.expect("no wake-up is lost");
                assert_eq!(got.unwrap(), number);
                number += 1;
            }
            burst_done.send(()).unwrap();
        }
    });
    sender.join().unwrap();
}

#[test]
fn an_async_receiver_moves_between_threads() {
    fn is_send<T: Send>(value: T) -> T {
        value
    }
    let to = endpoint("spawned");
    let receiver = Receiver::<u32>::bind(&Context::new(), &to).unwrap();
    let sender = Sender::connect(&Context::new(), &to, 10).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let got = runtime.block_on(async {
        let mut receiver = AsyncReceiver::new(receiver).unwrap();
        let task = tokio::spawn(is_send(async move { receiver.recv().await.unwrap() }));
        sender.send(&7, LONG).unwrap();
        task.await.unwrap()
    });
    assert_eq!(got, 7);
}

/// What a bare Unix socket reads first from the link: libzmq's greeting, or the end.
fn first_byte(to: &Endpoint) -> std::io::Result<usize> {
    let name = to.0.strip_prefix("ipc://@").unwrap();
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.set_read_timeout(Some(LONG))?;
    stream.read(&mut [0; 1])
}

#[test]
fn only_the_own_user_connects() {
    let to = endpoint("private");
    let _receiver = Receiver::<u32>::bind(&Context::new(), &to).unwrap();
    assert_eq!(first_byte(&to).unwrap(), 1, "the own user is greeted");
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return;
    }
    let stranger = std::thread::spawn(move || {
        let nobody: libc::uid_t = 65_534;
        // SAFETY: the raw system call changes the credentials of this thread only; it ends here.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, nobody, nobody, nobody) };
        assert_eq!(rc, 0, "root may become nobody");
        first_byte(&to)
    });
    let read = stranger.join().unwrap();
    assert!(matches!(read, Ok(0) | Err(_)), "another user is cut off, got {read:?}");
}

#[test]
fn children_inherit_no_descriptor_of_a_link() {
    use std::collections::BTreeSet;
    let open = || -> BTreeSet<i32> {
        let entries = std::fs::read_dir("/proc/self/fd").unwrap();
        entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect()
    };
    let before = open();
    let to = endpoint("cloexec");
    let context = Context::new();
    let receiver = Receiver::<u32>::bind(&context, &to).unwrap();
    let sender = Sender::connect(&context, &to, 10).unwrap();
    sender.send(&1, LONG).unwrap();
    assert_eq!(receiver.recv(Some(LONG)).unwrap(), Some(1));
    let new: Vec<i32> = open().difference(&before).copied().collect();
    assert!(new.len() >= 4, "listener, connection and wake-up descriptors, got {new:?}");
    for fd in new {
        // SAFETY: fcntl on a number; one that another test has closed meanwhile gives -1.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        assert!(flags == -1 || flags & libc::FD_CLOEXEC != 0, "descriptor {fd} would be inherited");
    }
}

#[test]
fn the_broadcast_between_hosts_is_for_those_who_know_its_key() {
    if !crate::gloo::IS_BUILT {
        eprintln!("skipped: built without the feature gloo");
        return;
    }
    let key = Key::of_secret("the secret of these tests").unwrap();
    let secret = CurveSecret::of(&key);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let (here, there) = (endpoint("hosts"), Endpoint(format!("tcp://{}", listener.local_addr().unwrap())));
    let context = Context::new();
    let mut sender = BroadcastSender::bind(&context, &here, LONG).unwrap();
    sender.add_remote(&context, (&there, listener.into()), &secret).unwrap();
    let other = CurveSecret::of(&key.derive("another")).public().unwrap();
    let _stranger = BroadcastReceiver::connect_remote(&Context::new(), &there, &other).unwrap();
    let public = secret.public().unwrap();
    let mut receivers = [
        BroadcastReceiver::connect(&Context::new(), &here).unwrap(),
        BroadcastReceiver::connect_remote(&Context::new(), &there, &public).unwrap(),
    ];
    sender.wait_for_subscribers(2, LONG).unwrap();
    let error = sender.wait_for_subscribers(3, Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error, LinkError::Subscribers { subscribed: 2, expected: 3, .. }), "{error}");
    for number in 0..100 {
        sender.send(number, &ToScheduler::Abort(RequestId(number))).unwrap();
    }
    for receiver in &mut receivers {
        for number in 0..100 {
            let got = receiver.recv(Some(LONG)).unwrap().expect("nothing is lost");
            assert_eq!((got.sequence, got.message), (number, ToScheduler::Abort(RequestId(number))));
        }
    }
}
