// A C interface to the part of Gloo's TCP transport that Lockstep uses: pairs and unbound buffers.
//
// Algorithms are not taken from Gloo: its sums run in ring order, ours in the order of a binary tree. No exception
// leaves this file: every function that can fail returns nonzero and writes one line to `error`.

#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Mesh {
  std::shared_ptr<gloo::transport::Device> device;
  std::shared_ptr<gloo::transport::Context> context;
};

struct Buffer {
  // Keeps the pairs alive for as long as a buffer of theirs is.
  std::shared_ptr<gloo::transport::Context> context;
  std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
};

struct Error {
  char* text;
  size_t room;

  int take(const char* what) {
    snprintf(text, room, "%s", what);
    return 1;
  }
};

// Runs `body`; 0 when it returns, 1 with its words when it throws.
template <typename Body>
int guarded(Error error, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    return error.take(e.what());
  } catch (...) {
    return error.take("unknown C++ exception");
  }
}

}  // namespace

extern "C" {

// Listens on `address` for every other rank. Null on failure.
void* lockstep_gloo_open(int rank, int size, const char* address, int64_t timeout_ms, char* text, size_t room) {
  auto mesh = std::make_unique<Mesh>();
  int failed = guarded({text, room}, [&] {
    gloo::transport::tcp::attr attr;
    attr.hostname = address;
    mesh->device = gloo::transport::tcp::CreateDevice(attr);
    mesh->context = mesh->device->createContext(rank, size);
    mesh->context->setTimeout(std::chrono::milliseconds(timeout_ms));
    for (int peer = 0; peer < size; peer++) {
      if (peer != rank) {
        mesh->context->createPair(peer);
      }
    }
  });
  return failed ? nullptr : mesh.release();
}

// Where `peer` reaches this rank: writes at most `room_out` bytes to `out` and their number to `len`.
int lockstep_gloo_address(void* mesh, int peer, uint8_t* out, size_t room_out, size_t* len, char* text, size_t room) {
  return guarded({text, room}, [&] {
    auto bytes = static_cast<Mesh*>(mesh)->context->getPair(peer)->address().bytes();
    if (bytes.size() > room_out) {
      throw std::length_error("an address of Gloo is longer than expected");
    }
    memcpy(out, bytes.data(), bytes.size());
    *len = bytes.size();
  });
}

// Joins the pair with `peer`, which says with `bytes` where it can be reached. Waits for the time-out at most.
int lockstep_gloo_connect(void* mesh, int peer, const uint8_t* bytes, size_t len, char* text, size_t room) {
  return guarded({text, room}, [&] {
    auto begin = reinterpret_cast<const char*>(bytes);
    static_cast<Mesh*>(mesh)->context->getPair(peer)->connect(std::vector<char>(begin, begin + len));
  });
}

void lockstep_gloo_close(void* mesh) {
  char text[64];
  // Destructors of sockets and threads may throw, too.
  guarded({text, sizeof text}, [&] { delete static_cast<Mesh*>(mesh); });
}

// `bytes` at `data` as a place to send from or receive into. Null on failure.
void* lockstep_gloo_buffer(void* mesh, void* data, size_t bytes, char* text, size_t room) {
  auto buffer = std::make_unique<Buffer>();
  int failed = guarded({text, room}, [&] {
    buffer->context = static_cast<Mesh*>(mesh)->context;
    buffer->buffer = buffer->context->createUnboundBuffer(data, bytes);
  });
  return failed ? nullptr : buffer.release();
}

void lockstep_gloo_buffer_free(void* buffer) {
  char text[64];
  guarded({text, sizeof text}, [&] { delete static_cast<Buffer*>(buffer); });
}

int lockstep_gloo_send(void* buffer, int peer, uint64_t slot, size_t bytes, char* text, size_t room) {
  return guarded({text, room}, [&] { static_cast<Buffer*>(buffer)->buffer->send(peer, slot, 0, bytes); });
}

int lockstep_gloo_recv(void* buffer, int peer, uint64_t slot, size_t bytes, char* text, size_t room) {
  return guarded({text, room}, [&] { static_cast<Buffer*>(buffer)->buffer->recv(peer, slot, 0, bytes); });
}

// Waits for the operation of `buffer`: 0 it is complete, 1 it failed, 2 the wait was aborted, 3 time is over. After a
// failure or a time-out Gloo has closed every pair of the mesh.
int lockstep_gloo_wait(void* buffer, int is_send, int64_t timeout_ms, char* text, size_t room) {
  auto timeout = std::chrono::milliseconds(timeout_ms);
  auto start = Clock::now();
  bool done = false;
  int failed = guarded({text, room}, [&] {
    auto& unbound = *static_cast<Buffer*>(buffer)->buffer;
    done = is_send ? unbound.waitSend(timeout) : unbound.waitRecv(timeout);
  });
  if (failed) {
    return Clock::now() - start >= timeout ? 3 : 1;
  }
  return done ? 0 : 2;
}

// Ends the wait of `buffer`, from another thread; when there is none, its next one.
void lockstep_gloo_abort(void* buffer) {
  auto& unbound = *static_cast<Buffer*>(buffer)->buffer;
  unbound.abortWaitSend();
  unbound.abortWaitRecv();
}

}  // extern "C"
