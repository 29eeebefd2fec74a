// switch HOSTS DELAY_US BITS_PER_SECOND
//
// An Ethernet switch in user space, for kernels without netem. Makes tap0, tap1, ...; the last byte
// of a host's MAC address is its number. Each frame leaves after the delay, at no more than the
// rate of the port (0: no limit). What would wait longer than 50 ms at a port is dropped.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

constexpr long kNanosecond = 1, kSecond = 1000000000 * kNanosecond, kQueue = kSecond / 20;

struct Frame {
  long leaves;
  std::string bytes;
};

struct Port {
  int file;
  long free_at = 0;  // when what waits here has left
  std::deque<Frame> waiting;
};

long now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

int open_tap(int number) {
  ifreq request;
  memset(&request, 0, sizeof request);
  snprintf(request.ifr_name, IFNAMSIZ, "tap%d", number);
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (file < 0 || ioctl(file, TUNSETIFF, &request) < 0) {
    perror("/dev/net/tun");
    exit(1);
  }
  return file;
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int num_ports = atoi(argv[1]);
  const long delay = atol(argv[2]) * 1000;
  const double bits_per_second = atof(argv[3]);
  std::vector<Port> ports(num_ports);
  std::vector<pollfd> polled(num_ports);
  for (int i = 0; i < num_ports; i++) {
    ports[i].file = open_tap(i);
    polled[i] = {ports[i].file, POLLIN, 0};
  }
  puts("ready");
  fflush(stdout);

  static char buffer[70000];
  auto pass_to = [&](Port& port, long arrived, ssize_t size) {
    long ready = arrived + delay;
    if (port.free_at - ready > kQueue) return;
    long start = std::max(ready, port.free_at);
    if (bits_per_second > 0) port.free_at = start + long(size * 8 / bits_per_second * kSecond);
    port.waiting.push_back({start, std::string(buffer, size)});
  };
  for (;;) {
    long next = -1;
    for (auto& port : ports)
      if (!port.waiting.empty() && (next < 0 || port.waiting.front().leaves < next))
        next = port.waiting.front().leaves;
    long pause = std::max(0L, next - now());
    timespec timeout = {pause / kSecond, pause % kSecond};
    ppoll(polled.data(), num_ports, next < 0 ? nullptr : &timeout, nullptr);
    for (int i = 0; i < num_ports; i++) {
      if (!(polled[i].revents & POLLIN)) continue;
      for (int k = 0; k < 64; k++) {
        ssize_t size = read(ports[i].file, buffer, sizeof buffer);
        if (size <= 0) break;
        const bool to_all = buffer[0] & 1;
        const int to = static_cast<unsigned char>(buffer[5]);
        for (int j = 0; j < num_ports; j++)
          if (to_all ? j != i : j == to) pass_to(ports[j], now(), size);
      }
    }
    for (auto& port : ports) {
      while (!port.waiting.empty() && port.waiting.front().leaves <= now()) {
        const std::string& bytes = port.waiting.front().bytes;
        if (write(port.file, bytes.data(), bytes.size()) < 0) {
          // The host's queue is full: dropped, as by any switch.
        }
        port.waiting.pop_front();
      }
    }
  }
}
