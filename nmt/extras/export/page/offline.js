// The page's service worker: all comes from the server, or, where none answers, from what the page kept when it was
// last loaded. The engine's requests pass through here too, and none goes to another place than the page's own.

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => event.respondWith(answer(event.request)));

async function answer(request) {
  if (new URL(request.url).origin !== self.location.origin) return Response.error();
  try {
    return await fetch(request, { cache: "no-cache" }); // a model that was exported again is seen
  } catch {
    const kept = await caches.match(request, { ignoreSearch: true });
    return kept ?? Response.error();
  }
}
