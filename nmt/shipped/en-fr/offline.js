// The page's service worker: all comes from the server, or, where none answers, from what the page kept when it was
// last loaded. The engine's requests pass through here too, and none of them goes to another place than the page's own.

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => event.respondWith(answer(event)));

async function answer({ request, clientId }) {
  if (new URL(request.url).origin === self.location.origin) {
    const answered = fetch(request, request.cache === "default" ? { cache: "no-cache" } : {});
    return answered.catch(async () => (await caches.match(request)) ?? Response.error());
  }
  const client = await self.clients.get(clientId); // other pages may be served at this address one day
  return client?.url.includes("/@browsermt/") ? Response.error() : fetch(request);
}
